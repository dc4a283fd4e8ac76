"""What a journal of plays adds up to: scores by variant, each against the baseline on the same items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from choreo_agents.training.journal import Record
from choreo_bench.evaluation import Difference, Score
from choreo_bench.evaluation.intervals import Interval, difference_interval, mean_interval, points
from choreo_bench.harness import Table

BASELINE = "baseline"


@dataclass(frozen=True)
class VariantOutcome:
    """How one variant did."""

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
        """How much better one variant did than another, on the items that both have."""
        one, other = _scores(self._records.get(first, [])), _scores(self._records.get(second, []))
        both = [item for item in one if item in other]
        if not both:
            return None
        return paired([one[item] for item in both], [other[item] for item in both])

    def table(self, title: str, scored: str) -> Table:
        """A row for each variant.

        Args:
            title: Of the table.
            scored: What a right answer is called.
        """
        outcomes = self.outcomes()
        parts = list(dict.fromkeys(part for outcome in outcomes for part in outcome.parts))
        against = ["to the baseline"] * any(outcome.difference is not None for outcome in outcomes)
        rows = []
        for each in outcomes:
            share = "unknown" if each.share is None else points(each.share, each.interval)
            difference = [points(each.difference, each.difference_interval, signed=True)] * len(against)
            shares = (points(each.parts.get(part), None) for part in parts)
            rows.append([each.name, str(each.items), share, *difference, *shares])
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
    """By item; what could not be played is wrong, if anybody knows what is right."""
    found = {record["item"]: record.get("score") for record in records}
    return {item: score for item, score in found.items() if score is not None}
