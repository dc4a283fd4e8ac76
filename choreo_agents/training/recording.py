"""Turns what an engine has done into traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from choreo_agents.engine import Engine
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.training.trace import Trace, TraceMessage


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
    starts = {each.handle.id: each.new_offset for each in made}
    messages: list[TraceMessage] = []
    for each in made:
        parents, offsets, start = tuple(parent.id for parent in each.parents), each.offsets, each.new_offset
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
            alone: dict[str, Any] = {"parents": (), "offsets": (), "new_offset": 0, "learn": (start, end)}
            twins.append(replace(message, tokens=(*words, *message.tokens), **alone))
    return Trace(trace.id, tuple(twins))
