"""Tables and a figure from a journal of first tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from choreo_agents.training.journal import Record
from choreo_bench.experiments.bench_pml.measure import DEAR_TOKENS, PLACES, WAYS, WHOLE, Way
from choreo_bench.harness import Report, Table
from choreo_bench.timing import Bar, Spread, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("prompt", "modules", "first token, ms", "spread", "runs", "encoded", "cached", "text / this")
LEFT_OUT = ("spread", "runs")
"""Columns that a terminal has no room for."""
HOST_COPY: Way = "host copy"
_NAMES: Mapping[Way, str] = {
    "text": "none: all from text",
    "HF generate": "none: HF generate",
    "disk": "on disk",
    "host": "in host memory",
    "device": "on the device",
    HOST_COPY: "the host copy alone",
}
LENGTH_BARS = {5120: 20.0, 16384: 60.0}
"""How many times as soon the first token has to come from the device, by cached tokens."""
COPY_BAR = 0.1
"""The share of the first-token time from the host that the copy may take."""


@dataclass(frozen=True)
class ModuleReport:
    """First tokens of one model.

    Args:
        settings: Model, dtype, threads, device, versions.
        records: As in a journal.
    """

    settings: Mapping[str, Any]
    records: Sequence[Record]

    def cases(self) -> list[str]:
        """Prompts, those of a length first, ascending."""
        lengths = {record["case"]: record["length"] for record in self.records}
        return sorted(lengths, key=lambda name: (lengths[name] is None, lengths[name] or 0, name))

    def lengths(self) -> dict[int, str]:
        """The names of prompts that were made for a length, by it."""
        names = {record["length"]: record["case"] for record in self.records if record["length"] is not None}
        return dict(sorted(names.items()))

    def seconds(self, case: str, way: Way) -> list[float]:
        """Return the seconds of every run, in order."""
        return [record["seconds"] for record in self.records if record["case"] == case and record["way"] == way]

    def ratio(self, case: str, above: Way, way: Way) -> Spread | None:
        """Return how many times as long another way takes: run by run, in the order in which they took turns.

        Where one of them ran once, that is held against every run of the other.
        """
        long, short = self.seconds(case, above), self.seconds(case, way)
        if not long or not short:
            return None
        count = min(len(long), len(short)) if min(len(long), len(short)) > 1 else max(len(long), len(short))
        pairs = zip(_as_many(long, count), _as_many(short, count), strict=True)
        return Spread.of([one / other for one, other in pairs])

    def whole(self, case: str) -> Way:
        """The faster way to encode everything."""
        timed = [way for way in WHOLE if self.seconds(case, way)]
        return min(timed, key=lambda way: median(self.seconds(case, way)), default="text")

    def bars(self) -> list[Bar]:
        """Compute every bar, also those that nothing was measured for; the faster full encoding counts."""
        lengths, bars = self.lengths(), []
        for length, wanted in LENGTH_BARS.items():
            ratio = self.ratio(lengths[length], self.whole(lengths[length]), "device") if length in lengths else None
            what = f"everything encoded / on the device, {length:,} cached tokens"
            bars.append(Bar(what, wanted, ratio, at_least=True, style="{:,.1f}x"))
        for length, case in lengths.items():
            what = f"host copy / first token from host memory, {length:,} cached"
            bars.append(Bar(what, COPY_BAR, self.ratio(case, HOST_COPY, "host"), style="{:.1%}"))
        return bars

    def rows(self, cases: Sequence[str]) -> list[tuple[str, ...]]:
        """Make the cells of a table of these prompts."""
        return [self._row(case, way) for case in cases for way in WAYS if self.seconds(case, way)]

    def _row(self, case: str, way: Way) -> tuple[str, ...]:
        *_, record = (row for row in self.records if row["case"] == case and row["way"] == way)
        times = [1000 * seconds for seconds in self.seconds(case, way)]
        spread = f"{min(times):,.1f} to {max(times):,.1f}" if len(times) > 1 else ""
        counts = (str(len(times)), f"{record['encoded']:,}", f"{record['reused']:,}")
        ratio = self.ratio(case, "text", way) if way in (*PLACES, "HF generate") else None
        against = "" if ratio is None else ratio.words("{:,.1f}x")
        return (case, _NAMES[way], f"{median(times):,.1f}", spread, *counts, against)

    def report(self) -> Report:
        """Report all of it; raw runs, bars and ratios as plain JSON."""
        by_length = list(self.lengths().values())
        parts = (
            ("by cached tokens", by_length),
            ("by example schema", [c for c in self.cases() if c not in by_length]),
        )
        title = title_of(self.settings)
        ratios = [
            {"case": case, "way": way, "against": above, **asdict(ratio)}
            for case in self.cases()
            for above in WHOLE
            for way in PLACES
            if (ratio := self.ratio(case, above, way)) is not None
        ]
        bars = [
            {"what": bar.what, "wanted": bar.wanted, "met": bar.met, "found": bar.measured and asdict(bar.measured)}
            for bar in self.bars()
        ]
        return Report(
            [
                Table(COLUMNS, self.rows(cases), f"{title}: {name}", words=2, left_out=LEFT_OUT)
                for name, cases in parts
                if cases
            ],
            {"settings": dict(self.settings), "bars": bars, "ratios": ratios, "runs": list(self.records)},
            f"{title}. {self.settings['made_by']}. Medians; spreads are the least and the most. What encodes more "
            f"than {DEAR_TOKENS:,} tokens is timed once.",
            [str(bar) for bar in self.bars()],
        )

    def figure(self) -> Figure:
        """Draw seconds by cached tokens, with the polynomial that fits best (Prompt Cache, figure 5).

        Encoding grows with the square, reading what is encoded with the length.
        """
        from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

        figure = Figure(figsize=(11, 4.2), layout="constrained")
        figure.suptitle(f"seconds to the first token: {title_of(self.settings)}", fontsize=9)
        panels: list[tuple[tuple[Way, ...], int, str]] = [
            (WHOLE, 2, "everything encoded; dashed: the best parabola"),
            (PLACES, 1, "modules cached; dashed: the best straight line"),
        ]
        for axes, (ways, degree, title) in zip(figure.subplots(1, 2), panels, strict=True):
            for way in ways:
                times = {length: self.seconds(case, way) for length, case in self.lengths().items()}
                points = {length: median(seconds) for length, seconds in times.items() if seconds}
                if points:
                    [line] = axes.plot(list(points), list(points.values()), marker="o", linestyle="none", label=way)
                if len(points) > degree:
                    at = np.linspace(0, max(points), 100)
                    fit = np.polyfit(list(points), list(points.values()), degree)
                    axes.plot(at, np.polyval(fit, at), linestyle="--", linewidth=1, color=line.get_color())
            axes.set(xlabel="cached tokens", ylim=(0, None))
            axes.set_title(title, loc="left", fontsize=10)
            axes.legend(frameon=False, fontsize=8)
        return figure


def _as_many(values: Sequence[float], count: int) -> Sequence[float]:
    """So many of the values; one alone counts for all."""
    return values[:count] if len(values) > 1 else [*values] * count
