"""Traces: a finished run as data. Each message has its tokens, its view with positions, and the span that was sampled.

`record` extracts them from an engine; on disk they are a journal with a line for each, so that a killed recording can
resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from choreo_agents.engine import Engine
from choreo_agents.errors import TrainingError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.training.journal import Journal, Record, read_journal


@dataclass(frozen=True)
class TraceMessage:
    """A message of a trace, as a call of the engine made it.

    Positions are the call's own: `offsets[i]` is the position at which it sees parent i, `position` that of its first
    token. Another call may see the same message at another position.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    """Unique in its trace."""
    tokens: tuple[int, ...]
    """All tokens, including the header and the end of a decoded message."""
    parents: tuple[str, ...] = ()
    """Names of the messages it attends to, in order."""
    offsets: tuple[int, ...] = ()
    position: int = 0
    learn: tuple[int, int] | None = None
    """Start, at least 1, and end of the tokens whose log-loss counts; None if the message is input."""
    adapter: str | None = None
    """Adapter that encodes it; None: the model alone."""
    mapped: bool = False
    """Whether a cache mapper makes its KV from its only parent, whose tokens it repeats at the same positions."""
    author: str | None = None
    role: str | None = None


@dataclass(frozen=True)
class Trace:
    """Messages of a run, parents before children.

    Raises:
        TrainingError: A view names a message that does not exist or comes later, or offsets, learnt tokens or a mapped
            message are invalid.
    """

    id: str
    messages: tuple[TraceMessage, ...]
    by_name: Mapping[str, TraceMessage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name: dict[str, TraceMessage] = {}
        for message in self.messages:
            _require_sound(self.id, message, by_name)
            by_name[message.name] = message
        object.__setattr__(self, "by_name", by_name)

    @property
    def learnt_tokens(self) -> int:
        """Number of tokens whose log-loss counts."""
        return sum(message.learn[1] - message.learn[0] for message in self.messages if message.learn is not None)

    @property
    def tokens(self) -> int:
        """Number of tokens that a forward pass encodes: each message once, mapped ones not at all."""
        return sum(len(message.tokens) for message in self.messages if not message.mapped)

    @property
    def reach(self) -> int:
        """Number of positions that the trace uses: one more than the highest position in any view."""
        ends = [0]
        for message in self.messages:
            view = zip(message.parents, message.offsets, strict=True)
            ends += [offset + len(self.by_name[parent].tokens) for parent, offset in view]
            ends.append(message.position + len(message.tokens))
        return max(ends)


def batched(traces: Sequence[Trace], most: int) -> list[list[Trace]]:
    """Cut traces, in their order, into batches of at most `most` tokens; a longer trace is a batch of its own."""
    batches: list[list[Trace]] = []
    free = 0
    for trace in traces:
        if not batches or trace.tokens > free:
            batches.append([])
            free = most
        batches[-1].append(trace)
        free -= trace.tokens
    return batches


def _require_sound(trace: str, message: TraceMessage, by_name: Mapping[str, TraceMessage]) -> None:
    """Raise `TrainingError` unless a message fits the messages before it."""
    where = f"message {message.name!r} of trace {trace!r}"
    missing = [parent for parent in message.parents if parent not in by_name]
    if missing:
        raise TrainingError(f"the view of {where} names {missing[0]!r}, but no earlier message has that name")
    if message.name in by_name:
        raise TrainingError(f"{where} has the same name as another")
    if not message.tokens:
        raise TrainingError(f"{where} is empty")
    if len(message.offsets) != len(message.parents) or min((*message.offsets, message.position)) < 0:
        raise TrainingError(f"{where} needs an offset of 0 or more for each parent, not {list(message.offsets)!r}")
    if message.learn is not None and not 1 <= message.learn[0] < message.learn[1] <= len(message.tokens):
        raise TrainingError(f"{where} learns tokens {message.learn!r}, but has only {len(message.tokens)}")
    if message.mapped:
        _require_copy(where, message, [by_name[parent] for parent in message.parents])


def _require_copy(where: str, message: TraceMessage, parents: Sequence[TraceMessage]) -> None:
    """Raise `TrainingError` unless a mapped message has the tokens and the position of its only parent."""
    same = len(parents) == 1 and parents[0].tokens == message.tokens and not parents[0].mapped
    if not same or message.position != parents[0].position or message.learn is not None:
        raise TrainingError(f"{where} is mapped: it must repeat one encoded message, in its place, and learn nothing")


def record(engine: Engine, name: str, handles: Sequence[MessageHandle]) -> Trace:
    """Return the trace of these messages and all their ancestors.

    Messages have the ids of their handles, which are the same in any engine with the same salt. Every sampled token is
    learnt; headers, and closing tokens that the model did not sample, are not. Under a method that keeps only text, the
    trace has the views that choreo would have had; what the model really read is its `text_twin`.

    Args:
        engine: An engine with any method.
        name: Id of the trace.
        handles: Handles that are still leased.

    Raises:
        HandleError: A handle is unknown, released, or another model's.
        TrainingError: A trace cannot express the run: a mapped message was mapped once more.
    """
    records = engine.inspect.records(handles)
    starts = {entry.handle.id: entry.position for entry in records}
    messages: list[TraceMessage] = []
    for entry in records:
        parents, offsets, start = tuple(parent.id for parent in entry.parents), entry.offsets, entry.position
        if entry.mapped:
            # Its parent may since have been released and encoded again at another position.
            start = starts[parents[0]]
            offsets = (start,)
        learn = None if entry.sampled is None or entry.sampled[0] == entry.sampled[1] else entry.sampled
        fields = (parents, offsets, start, learn, entry.adapter, entry.mapped, entry.author, entry.role)
        messages.append(TraceMessage(entry.handle.id, entry.tokens, *fields))
    return Trace(name, tuple(messages))


def handles_in(entries: Iterable[Mapping[str, Any]]) -> list[MessageHandle]:
    """Return the distinct handles in a graph's `state["handles"]`. Prompts are among their ancestors."""
    handles = (MessageHandle.model_validate(entry["handle"]) for entry in entries)
    return list(dict.fromkeys(handles))


def text_twin(trace: Trace) -> Trace:
    """Return the same calls over the text of their views instead of cached KV, as ordinary prompting does.

    Every learnt message becomes a single message with its parents' tokens before its own, from position 0 on, under its
    old name. Messages without learnt tokens are left out.
    """
    twins: list[TraceMessage] = []
    for message in trace.messages:
        if message.learn is not None:
            words = [token for parent in message.parents for token in trace.by_name[parent].tokens]
            start, end = (len(words) + place for place in message.learn)
            alone: dict[str, Any] = {"parents": (), "offsets": (), "position": 0, "learn": (start, end)}
            twins.append(replace(message, tokens=(*words, *message.tokens), **alone))
    return Trace(trace.id, tuple(twins))


_MESSAGES = TypeAdapter(tuple[TraceMessage, ...])


def add_traces(journal: Journal, traces: Sequence[Trace]) -> None:
    """Append traces to a journal under their ids; they are on disk when this returns.

    Args:
        journal: The recording, whose settings are all that decides the traces.
        traces: Traces with new ids.

    Raises:
        TrainingError: A trace has nothing to learn or an old id; then none is written.
    """
    names = [trace.id for trace in traces]
    twice = next((name for i, name in enumerate(names) if name in journal or name in names[:i]), None)
    if twice is not None:
        raise TrainingError(f"trace {twice!r} is in {str(journal.path)!r} already: use another id")
    idle = next((trace.id for trace in traces if not trace.learnt_tokens), None)
    if idle is not None:
        raise TrainingError(f"trace {idle!r} has nothing to learn: none of its tokens was sampled")
    for trace in traces:
        journal.add(trace.id, {"messages": _as_records(trace)})


def read_traces(path: Path) -> list[Trace]:
    """Read the traces of a recording in the order in which they were added, also while it is being written to.

    Raises:
        TrainingError: A trace is damaged; the message names its line.
        InvalidRequestError: A line is no record of a trace.
        OSError: There is no journal.
    """
    traces: list[Trace] = []
    for number, (name, stored) in enumerate(read_journal(path).items(), start=2):
        try:
            traces.append(Trace(name, _MESSAGES.validate_python(stored.get("messages"))))
        except (ValueError, TrainingError) as error:
            where = f"line {number} of {str(path)!r}"
            raise TrainingError(f"{where} is not a trace: remove it, or record it again ({error})") from error
    return traces


def digest_of(traces: Iterable[Trace]) -> str:
    """Return 64 hex digits that identify traces: SHA-256 over all their contents, in order."""
    code = hashlib.sha256()
    for trace in traces:
        code.update(json.dumps([trace.id, _as_records(trace)], sort_keys=True).encode() + b"\n")
    return code.hexdigest()


def _as_records(trace: Trace) -> list[Record]:
    """Return a trace's messages as JSON, without fields that have their defaults."""
    records: list[Record] = _MESSAGES.dump_python(trace.messages, mode="json", exclude_defaults=True)
    return records
