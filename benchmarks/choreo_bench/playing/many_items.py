"""Plays many items of a workflow at once, and writes every result down."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from choreo_agents.synthesis.mapper import MAPPER_FILE
from choreo_agents.training.journal import Journal
from choreo_agents.workflows.case import Case, Item, Options
from choreo_agents.workflows.many import PlayProgress, content_of, play_items, require_known
from choreo_agents.workflows.playing import Setup
from choreo_bench.cases import CASES
from choreo_bench.language import Split

TUNED_SUFFIX = " + tuned"
"""What ends the name of a variant that is played with an adapter."""


def draw_items(case: Case, options: Options, count: int, split: Split, seed: int) -> list[Item]:
    """Draw items of the embedded language: those of seeds `seed` to `seed + count - 1`."""
    return [CASES[case.name].draw(options, split, number) for number in range(seed, seed + count)]


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
        name: [content_of(item) + (tuned if name.endswith(TUNED_SUFFIX) else "") for item in items] for name in variants
    }
    for name, contents in contents_of.items():
        require_known(journal, name, items, contents)
    for name in variants:
        variant = setup.case.variants[name.removesuffix(TUNED_SUFFIX)]
        served = adapter if name.endswith(TUNED_SUFFIX) else None
        if all(f"{name} | {item.id}" in journal for item in items):
            on_progress(PlayProgress(name, len(items)))
            continue
        with Engine.load(
            model, method=variant.method, memory=Memory(kv_budget_bytes=kv_budget_bytes), adapter=served
        ) as engine:
            changed = setup.changed(variant)
            asyncio.run(play_items(engine, changed, name, items, contents_of[name], seeds, journal, on_progress))


def _identity_of(adapter: Path | None) -> str:
    """Tells an adapter, its settings and its cache mapper from others."""
    if adapter is None:
        return ""
    files = [adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE, MAPPER_FILE)]
    said = [hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "" for path in files]
    return f" {hashlib.sha256(' '.join(said).encode()).hexdigest()[:16]}"
