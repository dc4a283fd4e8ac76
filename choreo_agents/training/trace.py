"""A finished run as data: every message's tokens, what its call attended to and where, what of it was sampled; and how
an engine's run becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from choreo_agents.engine import Engine
from choreo_agents.errors import TrainingError
from choreo_agents.kv.handle import MessageHandle


@dataclass(frozen=True)
class TraceMessage:
    """One message of a trace, as one call of the engine made it.

    Positions are the call's own: `offsets[i]` is where parent i appears to it, `position` where its first token
    stands. Another call may show the same message elsewhere.
    """

    name: str
    """Unique in its trace."""
    tokens: tuple[int, ...]
    """All of them: a header and what closes a decoded message included."""
    parents: tuple[str, ...] = ()
    """Names of the messages it attends to, in order."""
    offsets: tuple[int, ...] = ()
    position: int = 0
    learn: tuple[int, int] | None = None
    """Where the tokens whose log-loss counts begin, at least at 1, and end; None: it was given."""
    adapter: str | None = None
    """Which adapter encodes it; None: the model alone."""
    mapped: bool = False
    """Whether its KV is what a cache mapper makes of its one parent's, whose tokens it repeats in the same place."""
    author: str | None = None
    role: str | None = None


@dataclass(frozen=True)
class Trace:
    """Messages in an order in which parents come first.

    Raises:
        TrainingError: A view names a message that does not exist or comes later, offsets do not fit their parents, or
            there is nothing to learn.
    """

    id: str
    messages: tuple[TraceMessage, ...]
    by_name: Mapping[str, TraceMessage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known: dict[str, TraceMessage] = {}
        for message in self.messages:
            _require_sound(self.id, message, known)
            known[message.name] = message
        object.__setattr__(self, "by_name", known)

    @property
    def learnt_tokens(self) -> int:
        """Tokens whose log-loss counts."""
        return sum(message.learn[1] - message.learn[0] for message in self.messages if message.learn is not None)

    @property
    def tokens(self) -> int:
        """Tokens that a forward pass encodes: each message's once, mapped ones not at all."""
        return sum(len(message.tokens) for message in self.messages if not message.mapped)

    @property
    def reach(self) -> int:
        """The first position that nothing of it reaches."""
        ends = [
            max(
                message.position + len(message.tokens),
                *(o + len(self.by_name[p].tokens) for p, o in zip(message.parents, message.offsets, strict=True)),
                0,
            )
            for message in self.messages
        ]
        return max(ends, default=0)


def batched(traces: Sequence[Trace], most: int) -> list[list[Trace]]:
    """Cut traces, in their order, into batches of at most so many tokens; a longer trace is one of its own."""
    batches: list[list[Trace]] = []
    left = 0
    for trace in traces:
        if not batches or trace.tokens > left:
            batches.append([])
            left = most
        batches[-1].append(trace)
        left -= trace.tokens
    return batches


def _require_sound(trace: str, message: TraceMessage, known: Mapping[str, TraceMessage]) -> None:
    """Raise unless a message fits those that come before it."""
    where = f"message {message.name!r} of trace {trace!r}"
    missing = [parent for parent in message.parents if parent not in known]
    if missing:
        raise TrainingError(f"the view of {where} names {missing[0]!r}, and no message before it is called that")
    if message.name in known:
        raise TrainingError(f"{where} has the name of another")
    if not message.tokens:
        raise TrainingError(f"{where} is empty")
    if len(message.offsets) != len(message.parents) or min((*message.offsets, message.position)) < 0:
        raise TrainingError(f"{where} needs an offset of 0 or more for each parent, not {list(message.offsets)!r}")
    if message.learn is not None and not 1 <= message.learn[0] < message.learn[1] <= len(message.tokens):
        raise TrainingError(f"{where} is to learn tokens {message.learn!r} of its {len(message.tokens)}")
    if message.mapped:
        _require_copy(where, message, [known[parent] for parent in message.parents])


def _require_copy(where: str, message: TraceMessage, parents: Sequence[TraceMessage]) -> None:
    """Raise unless a mapped message is its only parent's words in the same place."""
    same = len(parents) == 1 and parents[0].tokens == message.tokens and not parents[0].mapped
    if not same or message.position != parents[0].position or message.learn is not None:
        raise TrainingError(f"{where} is mapped: it repeats one encoded message, in its place, and learns nothing")


def record(engine: Engine, name: str, handles: Sequence[MessageHandle]) -> Trace:
    """What an engine did for these messages, and for all that they descend from.

    Messages are called as their handles are: the same in another engine if both have the same salt. Every sampled token
    is learnt; headers, and closing tokens that the model did not sample itself, are not. Under a method that keeps text
    only, views are those that choreo would have had: what the model really read is the trace's `text_twin`.

    Args:
        engine: Under any method.
        name: The trace's id.
        handles: Still leased.

    Raises:
        HandleError: A handle is unknown, released, or another model's.
        TrainingError: It cannot be said as a trace: a mapped message was mapped once more.
    """
    made = engine.inspect.records(handles)
    starts = {each.handle.id: each.position for each in made}
    messages: list[TraceMessage] = []
    for each in made:
        parents, offsets, start = tuple(parent.id for parent in each.parents), each.offsets, each.position
        if each.mapped:
            # What it is a copy of may have been released, and encoded again elsewhere, since.
            start = starts[parents[0]]
            offsets = (start,)
        learn = None if each.sampled is None or each.sampled[0] == each.sampled[1] else each.sampled
        placed = (parents, offsets, start, learn, each.adapter, each.mapped, each.author, each.role)
        messages.append(TraceMessage(each.handle.id, each.tokens, *placed))
    return Trace(name, tuple(messages))


def handles_in(entries: Iterable[Mapping[str, Any]]) -> list[MessageHandle]:
    """The handles of a graph's state (`state["handles"]`), each once. What was asked is among their ancestors."""
    handles = (MessageHandle.model_validate(entry["handle"]) for entry in entries)
    return list(dict.fromkeys(handles))


def text_twin(trace: Trace) -> Trace:
    """The same calls, each over the words of its view instead of their encodings: what ordinary prompting does.

    Every learnt message stands alone behind its parents' words, from position 0 on, under the trace's own names. What
    nothing is learnt of is left out.
    """
    twins: list[TraceMessage] = []
    for message in trace.messages:
        if message.learn is not None:
            words = [token for parent in message.parents for token in trace.by_name[parent].tokens]
            start, end = (len(words) + place for place in message.learn)
            alone: dict[str, Any] = {"parents": (), "offsets": (), "position": 0, "learn": (start, end)}
            twins.append(replace(message, tokens=(*words, *message.tokens), **alone))
    return Trace(trace.id, tuple(twins))
