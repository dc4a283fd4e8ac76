"""Whose encodings an entry of graph state names: its speaker's model's, and those that other models have made of its
words.

A handle is good for the model that made it. Where two models serve a graph, or the model has changed since, the words
are encoded once more for each that reads them, and the entry keeps what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from choreo_agents.graph.state import HandleEntry
from choreo_agents.kv.handle import MessageHandle, base_model

_FIELDS = len(MessageHandle.model_fields)


def model_of(plain: Mapping[str, Any]) -> str:
    """The fingerprint of the model that made a plain handle."""
    return base_model(str(plain["model"]))


def handle_for(entry: Mapping[str, Any], model: str) -> MessageHandle | None:
    """What an entry's message is to a model; None: it has not encoded it."""
    own = handle_in(entry["handle"])
    if own.base_model == model:
        return own
    other = (entry.get("also") or {}).get(model)
    return None if other is None else handle_in(other)


def handle_in(plain: Any) -> MessageHandle:
    """The handle that stands in graph state, where the same ones are read in every call.

    Raises:
        ValidationError: It is none.
    """
    try:
        if len(plain) == _FIELDS:
            return _handle(plain["id"], plain["model"], plain["length"])
    except (KeyError, TypeError):
        pass  # it is nothing like a handle
    return MessageHandle.model_validate(plain)


@lru_cache(maxsize=1 << 15, typed=True)
def _handle(name: str, model: str, length: int) -> MessageHandle:
    return MessageHandle(id=name, model=model, length=length)


def length_for(entry: Mapping[str, Any], model: str) -> int:
    """How many tokens a message takes in a view of a model's; of its speaker's, where it has not been encoded yet."""
    return (handle_for(entry, model) or handle_in(entry["handle"])).length


def handles_of(entry: Mapping[str, Any]) -> Iterator[MessageHandle]:
    """All encodings of an entry's message as it now reads, its speaker's first."""
    for plain in (entry["handle"], *(entry.get("also") or {}).values()):
        yield handle_in(plain)


def is_of_agent(entry: Mapping[str, Any]) -> bool:
    """Whether a model has said it: what people and plain nodes write is everybody's text."""
    return "persona" in entry


def put_in(entry: HandleEntry, handle: MessageHandle) -> HandleEntry:
    """The same words, with a model's encoding of them: in place of the one that this model had before, if it had."""
    before, plain = handle_for(entry, handle.base_model), handle.plain()
    lost = [] if before is None else [before.id]
    changed = HandleEntry(**{**entry, "earlier": [*entry.get("earlier", ()), *lost]}) if lost else entry.copy()
    if model_of(entry["handle"]) == handle.base_model:
        changed["handle"] = plain
    else:
        changed["also"] = {**(entry.get("also") or {}), handle.base_model: plain}
    return changed


def reworded(entry: HandleEntry, handle: MessageHandle, digest: str) -> HandleEntry:
    """Other words in an entry's place: what any model has of those before is no encoding of these."""
    earlier = [*entry.get("earlier", ()), *(each.id for each in handles_of(entry))]
    changed = HandleEntry(**{**entry, "handle": handle.plain(), "digest": digest, "earlier": earlier})
    changed.pop("also", None)
    return changed
