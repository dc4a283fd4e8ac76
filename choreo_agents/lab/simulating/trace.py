"""What recorded runs have asked for: the messages that their calls read and made, and which call waited for which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from choreo_agents.engine.recording import (
    RecordedCall,
    RecordedMessage,
    RecordedNode,
    Recording,
    RecordingHeader,
    read_recording,
)
from choreo_agents.errors import InvalidRequestError

_TOLD_TO_ALL = "system"
"""The role of messages that every run of a graph is told alike."""


@dataclass(frozen=True)
class TracedMessage:
    """A message by its size, and what its KV is encoded from."""

    name: str
    tokens: int
    parents: tuple[str, ...]
    is_common: bool
    """Whether copies of its run read the same one: nothing of what a run was asked or has said is in it."""


@dataclass(frozen=True)
class TracedCall:
    """A decode."""

    number: int
    """Its place in its run."""
    author: str
    reads: tuple[str, ...]
    """The messages of its view."""
    made: str
    """What it has said, for others to read."""
    decoded: str
    """What it has decoded: the same, or thoughts as well."""
    header: int
    """Tokens of its own turn that were given."""
    samples: int
    most: int
    """Tokens that it might sample."""
    after: tuple[int, ...]
    """What of its run it waits for."""
    asked_s: float
    first_s: float | None
    ended_s: float
    """When it was asked, had its first token and was over, as recorded."""


@dataclass(frozen=True)
class TracedFunction:
    """A function or tool of a run, which takes as long as it took."""

    number: int
    node: str
    took_s: float
    after: tuple[int, ...]
    ended_s: float
    """As recorded."""


Task = TracedCall | TracedFunction


@dataclass(frozen=True)
class TracedRun:
    """One run of a graph."""

    thread: str | None
    tasks: tuple[Task, ...]
    began_s: float
    """As recorded."""

    @property
    def calls(self) -> list[TracedCall]:
        """What engines do for it."""
        return [task for task in self.tasks if isinstance(task, TracedCall)]

    def first_token_s(self) -> list[float]:
        """Of each call that has sampled, as recorded: from when it was due to its first token."""
        return [call.first_s - self._due_s(call) for call in self.calls if call.first_s is not None]

    def _due_s(self, call: TracedCall) -> float:
        """When the last of what it waited for had ended."""
        return max([self.began_s, *(self.tasks[place].ended_s for place in call.after)])


@dataclass(frozen=True)
class RecordedTrace:
    """The runs of one recording."""

    path: Path
    header: RecordingHeader
    messages: Mapping[str, TracedMessage]
    runs: tuple[TracedRun, ...]
    notes: tuple[str, ...] = ()
    """What was left out."""

    @property
    def calls(self) -> list[TracedCall]:
        """Of all runs."""
        return [call for run in self.runs for call in run.calls]

    @property
    def makespan_s(self) -> float:
        """From the begin of the first run to the end of the last call or function, as recorded."""
        ended = max(task.ended_s for run in self.runs for task in run.tasks)
        return ended - min(run.began_s for run in self.runs)

    def threads(self) -> list[list[TracedRun]]:
        """Runs that follow each other, since they are of one thread; a run without one stands alone."""
        found: dict[object, list[TracedRun]] = {}
        for place, run in enumerate(self.runs):
            found.setdefault(place if run.thread is None else run.thread, []).append(run)
        return list(found.values())


def read_trace(path: str | Path) -> RecordedTrace:
    """What the runs of a recording have asked for.

    Raises:
        InvalidRequestError: It is no recording, damaged, of another version, has no calls, or calls of several models.
        OSError: It cannot be read.
    """
    recording = read_recording(path)
    calls = recording.calls()
    if not calls:
        raise InvalidRequestError(f"{str(path)!r} has no calls of agents: record runs that have some")
    models = sorted({call.model for call in calls})
    if len(models) > 1:
        raise InvalidRequestError(
            f"{str(path)!r} has calls of {len(models)} models ({', '.join(models)}), whose engines are others: record "
            "runs with one"
        )
    messages = _messages(path, recording)
    runs = [TracedRun(run.thread, _tasks(recording, run.run), run.at_s) for run in recording.runs]
    return RecordedTrace(
        Path(path),
        recording.header,
        messages,
        tuple(run for run in runs if run.calls),
        () if recording.cut is None else (f"{str(path)!r} is not whole: {recording.cut}",),
    )


def hurried(trace: RecordedTrace) -> RecordedTrace:
    """The same with functions that take no time."""
    runs = [
        replace(
            run, tasks=tuple(each if isinstance(each, TracedCall) else replace(each, took_s=0.0) for each in run.tasks)
        )
        for run in trace.runs
    ]
    return replace(trace, runs=tuple(runs))


def _messages(path: str | Path, recording: Recording) -> dict[str, TracedMessage]:
    found: dict[str, TracedMessage] = {}
    for line in recording.lines:
        if isinstance(line, RecordedMessage):
            _require_known(path, line.parents, found)
            is_common = line.role == _TOLD_TO_ALL and all(found[name].is_common for name in line.parents)
            found[line.name] = TracedMessage(line.name, line.tokens, line.parents, is_common)
        elif isinstance(line, RecordedCall):
            _require_known(path, (*line.reads, line.made, *([line.thought] if line.thought else [])), found)
    return found


def _require_known(path: str | Path, names: Iterable[str], found: Mapping[str, TracedMessage]) -> None:
    unknown = [name for name in names if name not in found]
    if unknown:
        raise InvalidRequestError(
            f"{str(path)!r} is damaged: message {unknown[0]!r} is read before any line says what it is"
        )


def _tasks(recording: Recording, run: int) -> tuple[Task, ...]:
    """Calls and functions of a run in the order in which they began, each with what it has waited for.

    What had ended when something began preceded it; but of what was made side by side in one superstep, nothing waits
    for another's end, however soon that came.
    """
    lines: list[RecordedCall | RecordedNode] = [*recording.calls(run), *recording.nodes(run)]
    lines.sort(key=_began)
    waited: list[int] = []
    """For each, all that came before it, as bits."""
    tasks: list[Task] = []
    for number, line in enumerate(lines):
        before = [place for place in range(number) if _precedes(lines[place], line)]
        above = 0
        for place in before:
            above |= waited[place]
        waited.append(above | sum(1 << place for place in before))
        after = tuple(place for place in before if not above >> place & 1)
        tasks.append(_task(number, line, after))
    return tuple(tasks)


def _precedes(earlier: RecordedCall | RecordedNode, later: RecordedCall | RecordedNode) -> bool:
    beside = _place(earlier)[:-1] == _place(later)[:-1] and _place(earlier) != _place(later)
    return _ended(earlier) <= _began(later) and not beside


def _place(line: RecordedCall | RecordedNode) -> tuple[str, int, tuple[str, int]]:
    """Graph and superstep, and the node's execution in it."""
    name = line.author if isinstance(line, RecordedCall) else line.node
    return name.rpartition("|")[0], line.step, (name, line.branch)


def _began(line: RecordedCall | RecordedNode) -> float:
    return line.asked_s if isinstance(line, RecordedCall) else line.began_s


def _ended(line: RecordedCall | RecordedNode) -> float:
    return line.said_s if isinstance(line, RecordedCall) else line.ended_s


def _task(number: int, line: RecordedCall | RecordedNode, after: Sequence[int]) -> Task:
    if isinstance(line, RecordedNode):
        return TracedFunction(number, line.node, line.ended_s - line.began_s, tuple(after), line.ended_s)
    return TracedCall(
        number=number,
        author=line.author,
        reads=line.reads,
        made=line.made,
        decoded=line.thought or line.made,
        header=line.header,
        samples=line.count,
        most=max(line.most, 1),
        after=tuple(after),
        asked_s=line.asked_s,
        first_s=line.first_s,
        ended_s=line.said_s,
    )
