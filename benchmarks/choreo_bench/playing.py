"""Plays many items of a workflow at once, writes every result down, and says what they are worth together.

Scores are by variant, each against the baseline on the same items.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from choreo_agents.engine import Engine, Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from choreo_agents.synthesis.mapper import MAPPER_FILE
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.cases import Case, Item, Options
from choreo_agents.workflows.playing import PlayProgress, Setup, play_items, require_known
from choreo_bench.cases import CASES
from choreo_bench.evaluation import Difference, Score
from choreo_bench.evaluation.intervals import Interval, difference_interval, mean_interval, points
from choreo_bench.harness import Table
from choreo_bench.language import Split

BASELINE = "baseline"
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
        raise InvalidRequestError(f"{without[0]!r} needs an adapter: pass its folder")
    identities = {name: _identity_of(adapter) if name.endswith(TUNED_SUFFIX) else "" for name in variants}
    for name, identity in identities.items():
        require_known(journal, name, items, identity)
    for name, identity in identities.items():
        variant = setup.case.variants[name.removesuffix(TUNED_SUFFIX)]
        served = adapter if name.endswith(TUNED_SUFFIX) else None
        if all(f"{name} | {item.id}" in journal for item in items):
            on_progress(PlayProgress(name, len(items)))
            continue
        with Engine.load(
            model, method=variant.method, memory=Memory(kv_budget_bytes=kv_budget_bytes), adapter=served
        ) as engine:
            changed = setup.changed(variant)
            asyncio.run(play_items(engine, changed, name, items, seeds, journal, on_progress, identity))


def _identity_of(adapter: Path | None) -> str:
    """Tells an adapter, its settings and its cache mapper from others."""
    if adapter is None:
        return ""
    files = [adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE, MAPPER_FILE)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "" for path in files]
    return f" {hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class VariantOutcome:
    """Result of one variant."""

    name: str
    items: int
    unscored: int
    """Items whose answer nobody knows."""
    failed: int
    """Items that could not be played: wrong, if anybody knows what is right."""
    share: float | None
    """Mean score."""
    interval: Interval | None
    """95 % of the share: Wilson's for right and wrong, else bootstrap."""
    difference: float | None
    """To the baseline, on the items that both have."""
    difference_interval: Interval | None
    """95 %: the one that inverts McNemar's test for right and wrong, else paired bootstrap."""
    parts: Mapping[str, float]
    """Means of further shares."""


class PlayReport:
    """Scores of one workflow.

    Args:
        records: As in a journal.
        variants: In this order.
        items: Ids of the items that count; a journal may hold more.
    """

    def __init__(self, records: Sequence[Record], variants: Sequence[str], items: Sequence[str]) -> None:
        known = {(record["variant"], record["item"]): record for record in records}
        self._records = {name: [known[name, item] for item in items if (name, item) in known] for name in variants}

    def outcomes(self) -> list[VariantOutcome]:
        return [self._outcome(name) for name in self._records]

    def difference(self, first: str, second: str) -> tuple[float, Interval | None] | None:
        """Return how much better one variant did than another, on the items that both have."""
        one, other = _scores(self._records.get(first, [])), _scores(self._records.get(second, []))
        both = [item for item in one if item in other]
        if not both:
            return None
        return paired([one[item] for item in both], [other[item] for item in both])

    def table(self, title: str, scored: str) -> Table:
        """Make a row for each variant.

        Args:
            title: Of the table.
            scored: What a right answer is called.
        """
        outcomes = self.outcomes()
        parts = list(dict.fromkeys(part for outcome in outcomes for part in outcome.parts))
        against = ["to the baseline"] * any(outcome.difference is not None for outcome in outcomes)
        rows = []
        for outcome in outcomes:
            share = "unknown" if outcome.share is None else points(outcome.share, outcome.interval)
            difference = [points(outcome.difference, outcome.difference_interval, signed=True)] * len(against)
            shares = (points(outcome.parts.get(part), None) for part in parts)
            rows.append([outcome.name, str(outcome.items), share, *difference, *shares])
        return Table(["method", "items", scored, *against, *parts], rows, title)

    def _outcome(self, name: str) -> VariantOutcome:
        records = self._records[name]
        scores = list(_scores(records).values())
        against = None if name == BASELINE else self.difference(name, BASELINE)
        names = dict.fromkeys(part for record in records for part in record.get("parts", {}))
        parts = {part: mean(r["parts"][part] for r in records if part in r.get("parts", {})) for part in names}
        return VariantOutcome(
            name=name,
            items=len(records),
            unscored=len(records) - len(scores),
            failed=sum("error" in record for record in records),
            share=mean(scores) if scores else None,
            interval=share_interval(scores),
            difference=None if against is None else against[0],
            difference_interval=None if against is None else against[1],
            parts=parts,
        )


def share_interval(scores: Sequence[float]) -> Interval | None:
    """95 % interval of a mean score."""
    if scores and _binary(scores):
        return Score(int(sum(scores)), len(scores)).interval()
    return mean_interval(scores)


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, Interval | None]:
    """The difference of two mean scores on the same items, with its 95 % interval."""
    if _binary(first) and _binary(second):
        counted = Difference.of([score == 1 for score in first], [score == 1 for score in second])
        return counted.share, counted.score_interval()
    if len({a - b for a, b in zip(first, second, strict=True)}) == 1:
        return mean(first) - mean(second), None  # a bootstrap of equal differences would state what nobody knows
    return mean(first) - mean(second), difference_interval(first, second)


def _binary(scores: Sequence[float]) -> bool:
    return all(score in (0, 1) for score in scores)


def _scores(records: Sequence[Record]) -> dict[str, float]:
    """Return the scores by item. An item that could not be played scores 0 if its answer is known."""
    scores = {record["item"]: record.get("score") for record in records}
    return {item: score for item, score in scores.items() if score is not None}
