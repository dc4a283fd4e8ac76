"""Plays many items of a workflow concurrently on one engine, and writes each result to a journal as it comes."""

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
"""Most items that are played concurrently."""
TOKENS_EACH = 2048
"""Tokens of KV memory for each concurrent item: a smaller memory budget lowers their number."""

T = TypeVar("T")


@dataclass(frozen=True)
class PlayProgress:
    """Progress of a variant over its items."""

    variant: str
    finished: int
    """Items with a result, including those that the journal had before."""
    tokens: int = 0
    """Tokens encoded and reused since the start."""
    seconds: float = 0.0


def seeds_of(items: Sequence[Item], seed: int) -> list[int]:
    """Return a seed for each item, which depends on its id and not on its place in the file."""
    return [int.from_bytes(hashlib.sha256(f"{seed} {item.id}".encode()).digest()[:6], "big") for item in items]


def content_of(item: Item) -> str:
    """Return 16 hex digits of an item's content, which differ between items of the same id."""
    return hashlib.sha256(item.model_dump_json(exclude_defaults=True).encode()).hexdigest()[:16]


def require_known(journal: Journal, variant: str, items: Sequence[Item], adapter: str = "") -> None:
    """Raise `InvalidRequestError` if the journal has a result under an item's id that is another item's or adapter's.

    Args:
        journal: The results.
        variant: Key of the results.
        items: The inputs.
        adapter: Digest of the adapter that the variant is played with; empty for the model alone.
    """
    for item in items:
        content = content_of(item) + adapter
        if journal.records.get(f"{variant} | {item.id}", {}).get("content", content) != content:
            raise InvalidRequestError(
                f"{str(journal.path)!r} has the result of another item with the id {item.id!r}, or of another adapter: "
                "pass another file, or other ids"
            )


async def play_items(
    engine: Engine,
    setup: Setup,
    variant: str,
    items: Sequence[Item],
    seeds: Sequence[int],
    journal: Journal,
    on_progress: Callable[[PlayProgress], None] = lambda progress: None,
    adapter: str = "",
) -> None:
    """Play the items that the journal does not have yet.

    An item that cannot be played, such as one whose view outgrows the model's context, is recorded with its error. An
    error that is not the item's, such as too little KV memory, ends the run; started again, it resumes.

    Args:
        engine: An engine with the variant's method.
        setup: The setup with the variant's options.
        variant: Key of the results.
        items: The inputs.
        seeds: A seed for each item.
        journal: Gets a record for each item.
        on_progress: Called after every item.
        adapter: As for `require_known`.

    Raises:
        ChoreoError: The engine failed, or has too little memory.
    """
    pending = [place for place, item in enumerate(items) if f"{variant} | {item.id}" not in journal]
    finished, started = len(items) - len(pending), time.perf_counter()
    on_progress(PlayProgress(variant, finished))

    async def play_one(place: int) -> None:
        nonlocal finished
        item = items[place]
        record: Record = {"variant": variant, "item": item.id, "content": content_of(item) + adapter}
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
        finished += 1
        stats = engine.stats()
        tokens = stats.tokens_encoded + stats.tokens_reused + stats.tokens_recomputed
        on_progress(PlayProgress(variant, finished, tokens, time.perf_counter() - started))

    await at_once((partial(play_one, place) for place in pending), room(engine))


def room(engine: Engine) -> int:
    """Return how many items can be played concurrently within the engine's KV budget."""
    tokens = engine.stats().kv_budget_bytes // engine.model.adapter.geometry.bytes_per_token
    return min(AT_ONCE, max(1, tokens // TOKENS_EACH))


async def at_once(jobs: Iterable[Callable[[], Awaitable[T]]], most: int) -> list[T]:
    """Run jobs, at most `most` at a time, and return their results in order; the first error cancels the others."""
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
