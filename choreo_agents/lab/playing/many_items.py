"""Plays many items of a workflow at once, and writes every result down."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError, KVBudgetError
from choreo_agents.lab.evaluation.evaluate import at_once, room
from choreo_agents.lab.language import Split
from choreo_agents.models import LoadedModel
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from choreo_agents.synthesis.mapper import MAPPER_FILE
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.case import Case, Item, Options
from choreo_agents.workflows.playing import Setup, play

TUNED_SUFFIX = " + tuned"
"""Behind a variant's name: with an adapter."""


@dataclass(frozen=True)
class PlayProgress:
    """How far a variant has come."""

    variant: str
    finished: int
    """Items, those that were known before included."""
    tokens: int = 0
    """Encoded and reused since it started."""
    seconds: float = 0.0


def draw_items(case: Case, options: Options, count: int, split: Split, seed: int) -> list[Item]:
    """Items of the embedded language: those of seeds `seed` to `seed + count - 1`."""
    return [case.draw(options, split, number) for number in range(seed, seed + count)]


def seeds_of(items: Sequence[Item], seed: int, *, drawn: bool) -> list[int]:
    """The seed of each item's run: of drawn ones by their number, of the user's by their ids, in whatever order."""
    if drawn:
        return [seed + place for place in range(len(items))]
    return [int.from_bytes(hashlib.sha256(f"{seed} {item.id}".encode()).digest()[:6], "big") for item in items]


def play_all(
    model: LoadedModel,
    setup: Setup,
    items: Sequence[Item],
    variants: Sequence[str],
    journal: Journal,
    *,
    seeds: Sequence[int],
    kv_budget_bytes: int = 1 << 30,
    on_progress: Callable[[PlayProgress], None] = lambda progress: None,
    adapter: Path | None = None,
) -> None:
    """Play what the journal does not hold yet; one engine for each variant, many items at a time.

    An item that cannot be played, because its view outgrows the model's context, say, is written down with the reason.
    What is no fault of an item, as too little KV memory, ends the run: started again, it plays the rest.

    Args:
        model: Serves all.
        setup: Workflow, options, prompts, sampling.
        items: What to do.
        variants: Names of the case's; with `+ tuned` behind it, one is served with the adapter.
        journal: Gets a record of each item and variant.
        seeds: Of the items.
        kv_budget_bytes: Of each engine.
        on_progress: Told of every item that is over.
        adapter: A folder with an adapter, for variants that are tuned.

    Raises:
        InvalidRequestError: The journal holds the result of another item under the same id, or of another adapter; or
            a tuned variant has none.
        ChoreoError: The engine failed, or has too little memory.
    """
    without = [name for name in variants if name.endswith(TUNED_SUFFIX) and adapter is None]
    if without:
        raise InvalidRequestError(f"{without[0]!r} is played with an adapter: give its folder")
    tuned = _identity_of(adapter)
    contents_of = {
        name: [_content(item) + (tuned if name.endswith(TUNED_SUFFIX) else "") for item in items] for name in variants
    }
    for name, contents in contents_of.items():
        for item, content in zip(items, contents, strict=True):
            if journal.records.get(f"{name} | {item.id}", {}).get("content", content) != content:
                raise InvalidRequestError(
                    f"{str(journal.path)!r} holds the result of another item that was called {item.id!r}, or of "
                    "another adapter: name another file, or give items ids of their own"
                )
    for name in variants:
        variant = setup.case.variants[name.removesuffix(TUNED_SUFFIX)]
        contents, served = contents_of[name], adapter if name.endswith(TUNED_SUFFIX) else None
        keys = [f"{name} | {item.id}" for item in items]
        left = [place for place, key in enumerate(keys) if key not in journal]
        progress = PlayProgress(name, len(items) - len(left))
        on_progress(progress)
        if not left:
            continue
        changed = setup.changed(variant)
        with Engine.load(
            model, method=variant.method, memory=Memory(kv_budget_bytes=kv_budget_bytes), adapter=served
        ) as engine:
            started = time.perf_counter()
            over = progress.finished

            async def one(
                place: int,
                engine: Engine = engine,
                changed: Setup = changed,
                name: str = name,
                started: float = started,
                contents: list[str] = contents,
            ) -> None:
                nonlocal over
                record: Record = {"variant": name, "item": items[place].id, "content": contents[place]}
                try:
                    result, spoken, _ = await play(engine, changed, items[place], seed=seeds[place])
                except KVBudgetError:
                    raise
                except InvalidRequestError as error:
                    score = 0.0 if items[place].graded else None
                    record |= {"error": f"{type(error).__name__}: {error}", "score": score}
                else:
                    parts = {"answer": result.answer, "score": result.score, "parts": dict(result.parts)}
                    record |= parts | {"messages": spoken}
                journal.add(f"{name} | {items[place].id}", record)
                over += 1
                stats = engine.stats()
                tokens = stats.tokens_encoded + stats.tokens_reused + stats.tokens_recomputed
                on_progress(PlayProgress(name, over, tokens, time.perf_counter() - started))

            asyncio.run(_all([partial(one, place) for place in left], room(engine)))


def _identity_of(adapter: Path | None) -> str:
    """Tells an adapter, its settings and its cache mapper from others."""
    if adapter is None:
        return ""
    files = [adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE, MAPPER_FILE)]
    said = [hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "" for path in files]
    return f" {hashlib.sha256(' '.join(said).encode()).hexdigest()[:16]}"


def _content(item: Item) -> str:
    """Tells whether an item is the same as one of the same id."""
    return hashlib.sha256(item.model_dump_json(exclude_defaults=True).encode()).hexdigest()[:16]


async def _all(jobs: Sequence[Callable[[], Any]], most: int) -> None:
    await at_once(jobs, most)
