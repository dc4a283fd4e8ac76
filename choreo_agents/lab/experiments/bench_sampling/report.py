"""What was measured, in softmaxes, and the bars that it is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import comb
from statistics import median
from typing import Any

import torch

BARS_AT = (64, 151_936, 1)
"""Rows, words and threads that bars are meant for."""
COLUMNS = ("every row", "logits", "ms", "softmaxes", "95 %", "transformers", "95 %", "allowed")

Pair = tuple[float, float]
"""Seconds of a softmax, and of the choice right after it."""


@dataclass
class CaseTimes:
    """One case, round by round."""

    name: str
    shape: str
    bar: float | None
    ours: list[Pair] = field(default_factory=list)
    theirs: list[Pair] = field(default_factory=list)
    """Empty if transformers cannot do it."""
    checked: int = 0
    """Tokens that were held against transformers' filters."""
    allowed: int = 0
    """Those that these leave; of greedy ones, those that score highest there."""

    @property
    def ratio(self) -> float:
        """The median, in softmaxes."""
        return median(ratios(self.ours))


@dataclass(frozen=True)
class SamplingBar:
    """What a case may cost at most, and what it does."""

    what: str
    wanted: float
    found: float

    @property
    def met(self) -> bool:
        return self.found <= self.wanted


@dataclass(frozen=True)
class SamplingReport:
    """Everything measured in one run."""

    rows: int
    words: int
    threads: int
    repeats: int
    nuclei: Mapping[str, int]
    """Words that top-p 0.9 keeps, by shape of logits."""
    cases: Sequence[CaseTimes]
    rewritten: Sequence[Pair]
    """The softmax, and one right after it into memory that is there."""

    @property
    def softmax_s(self) -> float:
        """The median of all."""
        return median(softmax for case in self.cases for softmax, _ in case.ours)

    def bars(self) -> list[SamplingBar]:
        """Those of the cases; none for other sizes than they are meant for."""
        if (self.rows, self.words, self.threads) != BARS_AT:
            return []
        return [SamplingBar(f"{c.name}, {c.shape}", c.bar, c.ratio) for c in self.cases if c.bar is not None]

    def as_object(self) -> dict[str, Any]:
        """In JSON's types."""
        bars = [{**asdict(bar), "met": bar.met} for bar in self.bars()]
        return {**asdict(self), **versions(), "softmax_s": self.softmax_s, "bars": bars}

    def table(self) -> list[tuple[str, ...]]:
        """A row for each case, and the softmax first: as it is called, and into memory that is there."""
        found: list[tuple[str, ...]] = [("softmax", "", f"{1000 * self.softmax_s:,.1f}", "1.00", "", "", "", "")]
        again = 1000 * median(seconds for _, seconds in self.rewritten)
        found.append(("softmax, into the same memory", "", f"{again:,.1f}", *_shown(self.rewritten), "", "", ""))
        for case in self.cases:
            milliseconds = 1000 * median(seconds for _, seconds in case.ours)
            theirs = _shown(case.theirs) if case.theirs else ("", "")
            allowed = f"{case.allowed:,} of {case.checked:,}" if case.checked else ""
            found.append((case.name, case.shape, f"{milliseconds:,.1f}", *_shown(case.ours), *theirs, allowed))
        return found

    def title(self) -> str:
        """What the table is of."""
        sizes = ", ".join(f"{shape} {size:,}" for shape, size in self.nuclei.items())
        return (
            f"[{self.rows}, {self.words:,}] fp32 logits, {self.threads} thread(s), medians of {self.repeats}; "
            f"words in a nucleus of 0.9: {sizes}"
        )

    def lines(self) -> list[str]:
        """The bars, and whether transformers' filters leave our tokens."""
        found = [
            f"{'met' if bar.met else 'missed'}: {bar.what}, at most {bar.wanted:g} softmaxes: {bar.found:.2f}"
            for bar in self.bars()
        ]
        checked, allowed = (sum(getattr(case, what) for case in self.cases) for what in ("checked", "allowed"))
        word = "met" if allowed == checked else "missed"
        return [*found, f"{word}: tokens that transformers' filters leave: {allowed:,} of {checked:,}"]

    def as_markdown(self, command: str) -> str:
        """The table, with what it takes to measure it again."""
        told = versions()
        lines = [f"`{command}`", "", f"{self.title()}. {', '.join(f'{k} {v}' for k, v in told.items())}.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", f"|---|---|{'--:|' * (len(COLUMNS) - 2)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.table()]
        return "\n".join([*lines, "", *(f"- {line}" for line in self.lines()), ""])


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Of each choice to the softmax before it."""
    return [seconds / softmax for softmax, seconds in pairs]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median, by order statistics; from the least to the greatest of fewer than six values."""
    ordered, count = sorted(values), len(values)
    outside, least = 0, 0
    while 40 * (outside + comb(count, least)) <= 2**count:
        outside += comb(count, least)
        least += 1
    place = max(0, least - 1)
    return ordered[place], ordered[count - 1 - place]


def versions() -> dict[str, str]:
    """Of what was measured beside ours."""
    return {"torch": torch.__version__, "transformers": version("transformers")}


def _shown(pairs: Sequence[Pair]) -> tuple[str, str]:
    low, high = median_interval(ratios(pairs))
    return f"{median(ratios(pairs)):.2f}", f"{low:.2f} to {high:.2f}"
