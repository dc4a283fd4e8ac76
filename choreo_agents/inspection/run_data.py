"""What a recording says, as the page of a run takes it: plain JSON, with words only where the recording has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

from choreo_agents.engine.recording.format import (
    RecordedCall,
    RecordedMemory,
    RecordedMessage,
    RecordedNode,
    Recording,
    RunStarted,
)
from choreo_agents.graph.recording.packing import Packing

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
            prefix + line.name: _message(line, prefix) for line in each.lines if isinstance(line, RecordedMessage)
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
        "steps": [{"at": line.at_s, "rows": line.rows} for line in recording.steps()],
        "memory": [_memory(line) for line in recording.lines if isinstance(line, RecordedMemory)],
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
        "calls": [_call(call, prefix) for call in recording.calls(run.run)],
        "nodes": [_node(node) for node in recording.nodes(run.run)],
    }


def _call(call: RecordedCall, prefix: str) -> dict[str, Any]:
    return {
        "author": call.author,
        "superstep": call.superstep,
        "branch": call.branch,
        "call": call.call,
        "step": call.step,
        "read": call.read,
        "reads": [prefix + name for name in call.reads],
        "offsets": call.offsets,
        "end": call.end,
        "header": call.header,
        "made": prefix + call.made,
        "thought": None if call.thought is None else prefix + call.thought,
        "count": call.count,
        "encoded": call.encoded,
        "reused": call.reused,
        "recomputed": call.recomputed,
        "asked": call.asked_s,
        "first": call.first_s,
        "said": call.said_s,
        "finish": call.finish,
        "words": call.words,
        "saidDigest": call.said,
    }


def _node(node: RecordedNode) -> dict[str, Any]:
    return {
        "node": node.node,
        "step": node.step,
        "branch": node.branch,
        "began": node.began_s,
        "ended": node.ended_s,
        "outcome": node.outcome,
    }


def _message(line: RecordedMessage, prefix: str) -> dict[str, Any]:
    return {
        "name": prefix + line.name,
        "author": line.author,
        "role": line.role,
        "origin": line.origin,
        "tokens": line.tokens,
        "at": line.at,
        "parents": [prefix + name for name in line.parents],
        "wordsOf": [prefix + name for name in line.words_of],
        "confidential": line.confidential,
    }


def _memory(line: RecordedMemory) -> dict[str, Any]:
    return {"at": line.at_s, "device": line.device_bytes, "host": line.host_bytes, "disk": line.disk_bytes}


def _told(packed: str | None) -> str | None:
    """What was packed, in words; None: it is not written."""
    if packed is None:
        return None
    told = "; ".join(_words(Packing(None).unpacked(packed)))
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]} ..."


def _words(value: Any) -> Iterator[str]:
    text = getattr(value, "text", None)
    if isinstance(text, str):
        yield str(text)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield f"{name}: {', '.join(_words(each))}"
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for each in value:
            yield from _words(each)
    else:
        yield value if isinstance(value, str) else repr(value)
