"""Groups a recording's lines by run for the page, which reads the fields of `format`; masked messages stay masked."""

from __future__ import annotations

from typing import Any

from choreo_agents.engine.recording.format import Line, RecordedMemory, RecordedMessage, Recording, RunStarted
from choreo_agents.graph.recording.packing import describe_packed

_OMITTED = {"call": ("request", "tokens", "is_set")}
"""Fields that the page does not show, by kind of line."""
_MESSAGES = {"name", "parents", "sources", "view", "answer", "thought"}
"""Fields whose values are names of messages."""
_LONGEST = 2000
"""Characters of a run's input that are shown."""


def run_data(recording: Recording, beside: Recording | None = None) -> dict[str, Any]:
    """Return a recording's data, and the runs of another recording beside it, such as a fork.

    Memory and forward passes are those of the first recording. `cut`: where it ends, if its process ended before it was
    closed.
    """
    header = recording.header
    both = (recording,) if beside is None else (recording, beside)
    messages: dict[str, dict[str, Any]] = {}
    runs = []
    for number, source in enumerate(both):
        prefix = f"{number}:"
        lines = [line for line in source.lines if isinstance(line, RecordedMessage)]
        messages |= {prefix + line.name: _line(line, prefix) for line in lines}
        runs += [_run(source, line, prefix) for line in source.runs]
    for number, run in enumerate(runs):
        run["title"] = f"run {number + 1}" + ("" if run["thread"] is None else f", thread {run['thread']}")
    return {
        "title": recording.path.name if beside is None else f"{recording.path.name} and {beside.path.name}",
        "model": header.model,
        "conditions": {"model": header.fingerprint, "method": header.method},
        "bytesPerToken": header.bytes_per_token,
        "cut": recording.cut,
        "runs": runs,
        "messages": list(messages.values()),
        "steps": [_line(line, "") for line in recording.steps()],
        "memory": [_line(line, "") for line in recording.lines if isinstance(line, RecordedMemory)],
    }


def _run(recording: Recording, run: RunStarted, prefix: str) -> dict[str, Any]:
    ended = recording.ended(run.run)
    return {
        "thread": run.thread,
        "began_s": run.at_s,
        "ended_s": None if ended is None else ended.at_s,
        "outcome": None if ended is None else ended.outcome,
        "input": None if run.input is None else _cut(describe_packed(run.input)),
        "edges": run.edges,
        "calls": [_line(call, prefix) for call in recording.calls(run.run)],
        "nodes": [_line(node, prefix) for node in recording.nodes(run.run)],
    }


def _line(line: Line, prefix: str) -> dict[str, Any]:
    """Return a line as plain values; the prefix keeps apart messages of two recordings."""
    fields = line.model_dump(exclude={"kind", "run", *_OMITTED.get(line.kind, ())})
    for name in fields.keys() & _MESSAGES:
        if (named := fields[name]) is not None:
            fields[name] = prefix + named if isinstance(named, str) else [prefix + item for item in named]
    return fields


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
