"""Tables of the parts of a decode step, and of what sampling adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from choreo_bench.harness import Report, Table
from choreo_bench.timing import Bar, Spread

Way = Literal["choreo", "torch"]
HOST = ("schedule", "plan", "account")
"""Work of Python's before and after a pass, in CPU time of the engine's thread."""
PARTS = (*HOST, "sample", "forward")
BAR_MS, BAR_AT = 0.3, (64, 16)
COLUMNS = ("rows", "messages", "", "schedule", "plan", "account", "host", "sample", "forward", "all", "torch")
Logits = Literal["peaked", "flat"]
SAMPLED_COLUMNS = ("rows", "messages", "logits", "greedy, ms", "T 0.7, p 0.95, ms", "of that sampling", "over greedy")
SAMPLED_BARS: dict[Logits, float] = {"peaked": 1.1, "flat": 1.3}
"""A step's time over a greedy one's, at most, at 32 rows."""
SAMPLED_ROWS = 32


@dataclass(frozen=True)
class StepShape:
    """Rows that decode over the same messages."""

    rows: int
    messages: int
    tokens: int
    """Of each message."""

    def cells(self) -> tuple[str, str]:
        return str(self.rows), f"{self.messages} x {self.tokens}"


@dataclass(frozen=True)
class Machine:
    """Machine and settings of a run."""

    model: str
    dtype: str
    threads: int
    made_by: str
    """Versions, and the processor's kind."""

    @property
    def title(self) -> str:
        return f"{self.model}, {self.dtype}, {self.threads} threads: ms of a decode step, medians"


@dataclass(frozen=True)
class StepTimes:
    """Medians over steps, in seconds."""

    shape: StepShape
    way: Way
    seconds: Mapping[str, float]
    steps: int

    @property
    def host(self) -> float:
        return sum(self.seconds[part] for part in HOST)

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())


def step_report(machine: Machine, computed: Mapping[Way, str], times: list[StepTimes]) -> Report:
    """Report a row for each shape and way; what computed, and the bar where it was measured.

    Args:
        machine: What it was measured on.
        computed: What computes a step, by way.
        times: In the order of rows.
    """
    torch = {row.shape: row.whole for row in times if row.way != "choreo"}
    rows = []
    for step in times:
        seconds = [*(step.seconds[part] for part in HOST), step.host]
        seconds += [step.seconds["sample"], step.seconds["forward"], step.whole]
        against = f"{torch[step.shape] / step.whole:.2f}x" if step.way == "choreo" else ""
        rows.append((*step.shape.cells(), step.way, *(f"{1e3 * part:.2f}" for part in seconds), against))
    lines = [f"{way}: {words}" for way, words in computed.items()]
    lines += [
        str(Bar("schedule, plan and account at 64 x 16", BAR_MS, Spread.of([1e3 * step.host]), style="{:.2f} ms"))
        for step in times
        if step.way == "choreo" and (step.shape.rows, step.shape.messages) == BAR_AT
    ]
    result = asdict(machine) | {"computed": dict(computed), "times": [asdict(step) for step in times], "lines": lines}
    return Report([Table(COLUMNS, rows, machine.title, words=3)], result, machine.made_by, lines)


@dataclass(frozen=True)
class SampledTimes:
    """Medians over steps, in seconds."""

    shape: StepShape
    logits: Logits
    greedy: float
    drawn: float
    sampling: float
    """Of what was drawn: choosing alone."""


def sampled_report(machine: Machine, times: list[SampledTimes]) -> Report:
    """Report a row for each shape and kind of logits; the bars, where they were measured."""
    rows, lines = [], []
    for step in times:
        ratio = step.drawn / step.greedy
        ms = (f"{1e3 * seconds:.1f}" for seconds in (step.greedy, step.drawn, step.sampling))
        rows.append((*step.shape.cells(), step.logits, *ms, f"{ratio:.2f}x"))
        if step.shape.rows == SAMPLED_ROWS:
            what = f"{SAMPLED_ROWS} rows, {step.logits} logits, over a greedy step"
            lines.append(str(Bar(what, SAMPLED_BARS[step.logits], Spread.of([ratio]))))
    result = asdict(machine) | {"times": [asdict(step) for step in times], "lines": lines}
    return Report([Table(SAMPLED_COLUMNS, rows, machine.title, words=3)], result, machine.made_by, lines)
