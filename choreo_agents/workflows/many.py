"""Many items of a workflow, played on one engine at the same time; every result is written down as it comes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError, KVBudgetError
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.case import Item
from choreo_agents.workflows.playing import Setup, play

AT_ONCE = 64
"""Items that are played together, ..."""
TOKENS_EACH = 2048
"""... as long as the engine's memory holds so many tokens for each of them."""

T = TypeVar("T")


@dataclass(frozen=True)
class PlayProgress:
    """How far a variant has come."""

    variant: str
    finished: int
    """Items, those that were known before included."""
    tokens: int = 0
    """Encoded and reused since it started."""
    seconds: float = 0.0


def seeds_of(items: Sequence[Item], seed: int) -> list[int]:
    """The seed of the run of each of the user's items: by its id, in whatever order they come."""
    return [int.from_bytes(hashlib.sha256(f"{seed} {item.id}".encode()).digest()[:6], "big") for item in items]


def content_of(item: Item) -> str:
    """A digest that tells an item from another of the same id."""
    return hashlib.sha256(item.model_dump_json(exclude_defaults=True).encode()).hexdigest()[:16]


def require_known(journal: Journal, variant: str, items: Sequence[Item], contents: Sequence[str]) -> None:
    """Raise `InvalidRequestError` if the journal holds the result of another item under an id."""
    for item, content in zip(items, contents, strict=True):
        if journal.records.get(f"{variant} | {item.id}", {}).get("content", content) != content:
            raise InvalidRequestError(
                f"{str(journal.path)!r} holds the result of another item that was called {item.id!r}, or of "
                "another adapter: name another file, or give items ids of their own"
            )


async def play_items(
    engine: Engine,
    setup: Setup,
    variant: str,
    items: Sequence[Item],
    contents: Sequence[str],
    seeds: Sequence[int],
    journal: Journal,
    on_progress: Callable[[PlayProgress], None] = lambda progress: None,
) -> None:
    """Play what the journal does not hold yet.

    An item that cannot be played, because its view outgrows the model's context, say, is written down with the reason.
    What is no fault of an item, as too little KV memory, ends the run: started again, it plays the rest.

    Args:
        engine: Of the variant's method.
        setup: As the variant has it.
        variant: Names the results.
        items: What to do.
        contents: A digest of each, which is written down with its result.
        seeds: Of the runs.
        journal: Gets a record of each item.
        on_progress: Told of every item that is over.

    Raises:
        ChoreoError: The engine failed, or has too little memory.
    """
    left = [place for place, item in enumerate(items) if f"{variant} | {item.id}" not in journal]
    over, started = len(items) - len(left), time.perf_counter()
    on_progress(PlayProgress(variant, over))

    async def one(place: int) -> None:
        nonlocal over
        item = items[place]
        record: Record = {"variant": variant, "item": item.id, "content": contents[place]}
        try:
            result, spoken, _ = await play(engine, setup, item, seed=seeds[place])
        except KVBudgetError:
            raise
        except InvalidRequestError as error:
            record |= {"error": f"{type(error).__name__}: {error}", "score": 0.0 if item.graded else None}
        else:
            parts = {"answer": result.answer, "score": result.score, "parts": dict(result.parts)}
            record |= parts | {"messages": spoken}
        journal.add(f"{variant} | {item.id}", record)
        over += 1
        stats = engine.stats()
        tokens = stats.tokens_encoded + stats.tokens_reused + stats.tokens_recomputed
        on_progress(PlayProgress(variant, over, tokens, time.perf_counter() - started))

    await at_once((partial(one, place) for place in left), room(engine))


def room(engine: Engine) -> int:
    """How many items can be played at once."""
    tokens = engine.stats().kv_budget_bytes // engine.model.adapter.geometry.bytes_per_token
    return min(AT_ONCE, max(1, tokens // TOKENS_EACH))


async def at_once(jobs: Iterable[Callable[[], Awaitable[T]]], most: int) -> list[T]:
    """Run jobs, `most` of them at a time, and return their results in order; the first error cancels the others."""
    gate = asyncio.Semaphore(most)

    async def gated(job: Callable[[], Awaitable[T]]) -> T:
        async with gate:
            return await job()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gated(job)) for job in jobs]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
