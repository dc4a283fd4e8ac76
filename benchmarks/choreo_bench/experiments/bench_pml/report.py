"""What a journal of first tokens adds up to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from choreo_agents.training.journal import Record
from choreo_bench.experiments.bench_pml.measure import PLACES, WAYS, WHOLE, Way

COLUMNS = ("prompt", "modules", "first token, ms", "spread", "runs", "encoded", "cached", "text / this")
HOST_COPY: Way = "host copy"
_NAMES: Mapping[Way, str] = {
    "text": "none: all from text",
    "HF generate": "none: HF generate",
    "disk": "on disk",
    "host": "in host memory",
    "device": "on the device",
    HOST_COPY: "the host copy alone",
}


@dataclass(frozen=True)
class Spread:
    """A median, and the least and most beside it."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class PromptBar:
    """What a median has to be."""

    what: str
    wanted: float
    at_least: bool
    found: Spread | None
    """None: it was not measured."""

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found.middle >= self.wanted if self.at_least else self.found.middle <= self.wanted


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
        found = {record["case"]: record["length"] for record in self.records}
        return sorted(found, key=lambda name: (found[name] is None, found[name] or 0, name))

    def lengths(self) -> dict[int, str]:
        """The names of prompts that were made for a length, by it."""
        found = {record["length"]: record["case"] for record in self.records if record["length"] is not None}
        return dict(sorted(found.items()))

    def seconds(self, case: str, way: Way) -> list[float]:
        """Of every run, in order."""
        return [each["seconds"] for each in self.records if each["case"] == case and each["way"] == way]

    def ratio(self, case: str, above: Way, way: Way) -> Spread | None:
        """How many times as long another way takes: run by run, in the order in which they took turns.

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

    def bars(self) -> list[PromptBar]:
        """Every bar, those that nothing was measured for included; the faster full encoding is what counts."""
        lengths = self.lengths()
        found = []
        for length, wanted in LENGTH_BARS.items():
            ratio = self.ratio(lengths[length], self.whole(lengths[length]), "device") if length in lengths else None
            found.append(
                PromptBar(f"everything encoded / on the device, {length:,} cached tokens", wanted, True, ratio)
            )
        for length, case in lengths.items():
            share = self.ratio(case, HOST_COPY, "host")
            found.append(
                PromptBar(f"host copy / first token from host memory, {length:,} cached", COPY_BAR, False, share)
            )
        return found

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells."""
        for case in self.cases():
            for way in WAYS:
                own = [record for record in self.records if record["case"] == case and record["way"] == way]
                if own:
                    yield self._row(case, way, own[-1])

    def _row(self, case: str, way: Way, record: Record) -> tuple[str, ...]:
        times = [1000 * each for each in self.seconds(case, way)]
        found = Spread.of(times)
        spread = f"{found.least:,.1f} to {found.most:,.1f}" if len(times) > 1 else ""
        counts = (str(len(times)), f"{record['encoded']:,}", f"{record['reused']:,}")
        ratio = self.ratio(case, "text", way) if way in (*PLACES, "HF generate") else None
        against = "" if ratio is None else _with_spread(ratio, "{:,.1f}x", several=ratio.least < ratio.most)
        return (case, _NAMES[way], f"{found.middle:,.1f}", spread, *counts, against)

    def lines(self) -> list[str]:
        """The bars, met, missed or not measured."""
        found = []
        for bar in self.bars():
            sign = "at least" if bar.at_least else "at most"
            wanted = f"{sign} {bar.wanted:g}x" if bar.at_least else f"{sign} {bar.wanted:.0%}"
            if bar.found is None:
                found.append(f"not measured: {bar.what}: {wanted}")
                continue
            said = _with_spread(bar.found, "{:,.1f}x" if bar.at_least else "{:.1%}")
            found.append(f"{'met' if bar.met else 'missed'}: {bar.what}: {said}, {wanted}")
        return found

    def title(self) -> str:
        said = self.settings
        threads = f"{said['threads']} thread{'' if said['threads'] == 1 else 's'}"
        return f"{said['model']}, {said['dtype']}, {said['device']}, {threads}"

    def as_object(self) -> dict[str, Any]:
        """Settings, bars, ratios and raw runs as plain JSON."""
        ratios = [
            {"case": case, "way": way, "against": above, **vars(ratio)}
            for case in self.cases()
            for above in WHOLE
            for way in PLACES
            if (ratio := self.ratio(case, above, way)) is not None
        ]
        bars = [
            {"what": bar.what, "wanted": bar.wanted, "met": bar.met, "found": bar.found and vars(bar.found)}
            for bar in self.bars()
        ]
        return {"settings": dict(self.settings), "bars": bars, "ratios": ratios, "runs": list(self.records)}


def _with_spread(found: Spread, written: str, *, several: bool = True) -> str:
    middle, least, most = (written.format(each) for each in (found.middle, found.least, found.most))
    return f"{middle} ({least} to {most})" if several else middle


def _as_many(values: Sequence[float], count: int) -> Sequence[float]:
    """So many of the values; one alone counts for all."""
    return values[:count] if len(values) > 1 else [*values] * count


def as_markdown(report: ModuleReport, command: str) -> str:
    """The tables, by length and by example, with the command that makes them again."""
    versions = ", ".join(f"{name} {report.settings[name]}" for name in ("torch", "transformers"))
    lines = [f"`{command}`", "", f"{report.title()}. {versions}. Medians; spreads are the least and the most.", ""]
    by_length = set(report.lengths().values())
    for title, wanted in (("By cached tokens", True), ("By example schema", False)):
        rows = [row for row in report.rows() if (row[0] in by_length) == wanted]
        if rows:
            lines += [f"## {title}", "", f"| {' | '.join(COLUMNS)} |", "|---|---" + "|--:" * (len(COLUMNS) - 2) + "|"]
            lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in report.lines()), ""])
