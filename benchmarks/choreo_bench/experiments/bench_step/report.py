"""What the parts of a decode step cost, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Way = Literal["choreo", "torch"]
HOST = ("schedule", "plan", "account")
"""Work of Python's before and after a pass, in CPU time of the engine's thread."""
PARTS = (*HOST, "sample", "forward")
BAR_MS, BAR_AT = 0.3, (64, 16)
COLUMNS = ("rows", "messages", "", "schedule", "plan", "account", "host", "sample", "forward", "all", "torch")


@dataclass(frozen=True)
class StepShape:
    """Rows that decode over the same messages."""

    rows: int
    messages: int
    tokens: int
    """Of each message."""


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


@dataclass(frozen=True)
class StepReport:
    """Of one run."""

    model: str
    dtype: str
    threads: int
    made_by: str
    """Versions, and the processor's kind."""
    computed: Mapping[Way, str]
    """What computes a step, by way."""
    times: tuple[StepTimes, ...]

    def title(self) -> str:
        return f"{self.model}, {self.dtype}, {self.threads} threads: ms of a decode step, medians"

    def rows(self) -> list[tuple[str, ...]]:
        """A line for each shape and way."""
        torch = {each.shape: each.whole for each in self.times if each.way != "choreo"}
        found: list[tuple[str, ...]] = []
        for each in self.times:
            parts = {part: f"{1e3 * seconds:.2f}" for part, seconds in each.seconds.items()}
            against = f"{torch[each.shape] / each.whole:.2f}x" if each.way == "choreo" else ""
            host, whole = f"{1e3 * each.host:.2f}", f"{1e3 * each.whole:.2f}"
            shape = (str(each.shape.rows), f"{each.shape.messages} x {each.shape.tokens}", each.way)
            own = (parts["schedule"], parts["plan"], parts["account"], host, parts["sample"], parts["forward"])
            found.append((*shape, *own, whole, against))
        return found

    def lines(self) -> list[str]:
        """What computed, and the bar where it was measured."""
        said = [f"{way}: {computed}" for way, computed in self.computed.items()]
        for each in self.times:
            if each.way == "choreo" and (each.shape.rows, each.shape.messages) == BAR_AT:
                met = "met" if each.host * 1e3 <= BAR_MS else "missed"
                rows, messages = BAR_AT
                said.append(
                    f"{met}: schedule, plan and account at {rows} x {messages} in {BAR_MS} ms: {1e3 * each.host:.2f}"
                )
        return said

    def as_markdown(self, command: str) -> str:
        """The table with the command that makes it."""
        return markdown(self, COLUMNS, command)

    def as_object(self) -> dict[str, Any]:
        return asdict(self) | {"lines": self.lines()}


class Tabled(Protocol):
    """What can be written as a table."""

    @property
    def made_by(self) -> str: ...

    def title(self) -> str: ...

    def rows(self) -> list[tuple[str, ...]]: ...

    def lines(self) -> list[str]: ...


def markdown(report: Tabled, columns: Sequence[str], command: str) -> str:
    """A report's table, with the command that makes it."""
    rule = ["--:", "--:", "---", *["--:"] * (len(columns) - 3)]
    head = [f"`{command}`", "", report.made_by, "", report.title(), "", _line(columns), _line(rule)]
    return "\n".join([*head, *map(_line, report.rows()), "", *(f"- {line}" for line in report.lines()), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
