"""What a recording says, as the page of a run takes it: plain JSON, with words only where the recording has them."""

from __future__ import annotations

from typing import Any, TypedDict

from choreo_agents.engine.recording.format import Line, RecordedMemory, RecordedMessage, Recording, RunStarted
from choreo_agents.graph.recording.packing import in_words

_LEFT = {"call": ("asked", "tokens", "is_set"), "message": ("offsets",), "step": ("tokens",)}
"""What the page does not show of a line."""
_MESSAGES = {"name", "parents", "words_of", "reads", "made", "thought"}
"""What names messages."""
_NAMES = {
    "said": "saidDigest",
    "words_of": "wordsOf",
    **{f"{name}_s": name for name in ("at", "asked", "first", "said", "began", "ended")},
    **{f"{tier}_bytes": tier for tier in ("device", "host", "disk")},
}
_LONGEST = 2000
"""Characters of what a run was given that are shown."""


class RunData(TypedDict):
    """What the page is given."""

    title: str
    model: str
    conditions: dict[str, str]
    bytesPerToken: int
    cut: str | None
    """Where a recording ends whose process ended before it was closed."""
    runs: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    memory: list[dict[str, Any]]


def run_data(recording: Recording, beside: Recording | None = None) -> RunData:
    """All of a recording, and the runs of another one beside it: a fork, say.

    Memory and forward passes are those of the first.
    """
    header = recording.header
    both = (recording,) if beside is None else (recording, beside)
    messages: dict[str, dict[str, Any]] = {}
    runs = []
    for number, each in enumerate(both):
        prefix = f"{number}:"
        messages |= {
            prefix + line.name: _line(line, prefix) for line in each.lines if isinstance(line, RecordedMessage)
        }
        runs += [_run(each, line, prefix) for line in each.runs]
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
        "began": run.at_s,
        "ended": None if ended is None else ended.at_s,
        "outcome": None if ended is None else ended.outcome,
        "given": _told(run.given),
        "edges": run.edges,
        "calls": [_line(call, prefix) for call in recording.calls(run.run)],
        "nodes": [_line(node, prefix) for node in recording.nodes(run.run)],
    }


def _line(line: Line, prefix: str) -> dict[str, Any]:
    """A line as the page has it, which calls some things otherwise; the messages of each recording have its prefix."""
    told = line.model_dump(exclude={"kind", "run", *_LEFT.get(line.kind, ())})
    for name in told.keys() & _MESSAGES:
        if (named := told[name]) is not None:
            told[name] = prefix + named if isinstance(named, str) else [prefix + each for each in named]
    return {_NAMES.get(name, name): each for name, each in told.items()}


def _told(packed: str | None) -> str | None:
    """What was packed, in words; None: it is not written."""
    if packed is None:
        return None
    told = in_words(packed)
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]} ..."
