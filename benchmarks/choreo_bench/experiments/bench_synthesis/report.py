"""A table and a figure from a journal of merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from choreo_agents.training.journal import Record
from choreo_bench.experiments.bench_synthesis.measure import DEAR_TOKENS, MERGES, PLAIN, TEXT, WAYS, Way
from choreo_bench.harness import Report, Table
from choreo_bench.timing import title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "branches",
    "way",
    "first token, ms",
    "spread",
    "runs",
    "tokens encoded",
    "tokens mapped",
    f"{TEXT} / this",
    f"{PLAIN} / this",
)


@dataclass(frozen=True)
class SynthesisReport:
    """Merges of one model.

    Args:
        settings: Model, dtype, threads, device, versions.
        records: As in a journal.
    """

    settings: Mapping[str, Any]
    records: Sequence[Record]

    def lengths(self) -> list[tuple[int, int]]:
        """Return the pairs of branches and tokens that were measured, ascending."""
        return sorted({(record["branches"], record["length"]) for record in self.records})

    def seconds(self, size: tuple[int, int], way: Way) -> float | None:
        """The median of a way's times to the first token; None if it was not timed."""
        record = self._of(size).get(way)
        return None if record is None else median(record["first_token_s"])

    def ratio(self, size: tuple[int, int], above: Way, way: Way) -> float | None:
        """Return how many times as long another way takes."""
        long, short = self.seconds(size, above), self.seconds(size, way)
        return None if long is None or not short else long / short

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells."""
        records = {size: self._of(size) for size in self.lengths()}
        return [self._row(size, way, of[way]) for size, of in records.items() for way in WAYS if way in of]

    def _row(self, size: tuple[int, int], way: Way, record: Record) -> tuple[str, ...]:
        times = [1000 * seconds for seconds in record["first_token_s"]]
        spread = f"{min(times):,.0f} to {max(times):,.0f}" if len(times) > 1 else ""
        counts = (f"{record['tokens_encoded']:,}", f"{record['tokens_mapped']:,}")
        ratios = [self.ratio(size, above, way) if above != way else None for above in (TEXT, PLAIN)]
        against = ("" if ratio is None else f"{ratio:,.1f}x" for ratio in ratios)
        return (f"{size[0]} x {size[1]:,}", way, f"{median(times):,.0f}", spread, str(len(times)), *counts, *against)

    def report(self) -> Report:
        """Report all of it; raw runs and ratios as plain JSON."""
        ratios = [
            {"branches": size[0], "length": size[1], "way": way, "against": above, "ratio": ratio}
            for size in self.lengths()
            for way in MERGES
            for above in (TEXT, PLAIN)
            if (ratio := self.ratio(size, above, way)) is not None
        ]
        title = title_of(self.settings)
        return Report(
            [Table(COLUMNS, self.rows(), title, words=2, left_out=("spread", "runs"))],
            {"settings": dict(self.settings), "ratios": ratios, "runs": list(self.records)},
            f"{title}. {self.settings['made_by']}. Medians; text of more than {DEAR_TOKENS:,} tokens is timed once.",
        )

    def figure(self) -> Figure:
        """Draw how many times as long text takes, by the length of a branch."""
        from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.suptitle(f"text / merge from caches, first token, more is better: {title_of(self.settings)}", fontsize=9)
        for axes, above in zip(figure.subplots(1, 2), (TEXT, PLAIN), strict=True):
            for way in MERGES:
                points = [(size[1], self.ratio(size, above, way)) for size in self.lengths()]
                known = [(at, ratio) for at, ratio in points if ratio is not None]
                axes.plot([at for at, _ in known], [ratio for _, ratio in known], marker="o", label=way)
            axes.axhline(1.0, color="#222222", linestyle="--", linewidth=1)
            ticks = sorted({length for _, length in self.lengths()})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xlabel("tokens of each branch")
            axes.set_title(f"against {above}", loc="left", fontsize=10)
            axes.legend(frameon=False, fontsize=8)
        return figure

    def _of(self, size: tuple[int, int]) -> dict[Way, Record]:
        return {record["way"]: record for record in self.records if (record["branches"], record["length"]) == size}
