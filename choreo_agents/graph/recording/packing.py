"""Inputs of runs, as a file has them: packed by LangGraph's serializer, which reads back no types but a graph's own."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.types import Send

from choreo_agents.chat import thoughts_of
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import strict_serializer
from choreo_agents.graph.signer import is_confidential


class Packing:
    """Of one graph: packs what its own schemas are made of, and unpacks nothing else.

    Args:
        builder: The graph's; None: of no graph, so that types of its own come as the plain values they were packed as.
    """

    def __init__(self, builder: Any) -> None:
        self._serializer = strict_serializer(builder)

    def packed(self, value: Any) -> str | None:
        """A value as text; None if it could not be read back as it is, but for tuples, which come back as lists."""
        try:
            kind, written = self._serializer.dumps_typed(value)
            text = f"{kind}:{base64.b64encode(written).decode()}"
            other = self.unpacked(text)
        except Exception:  # whatever the types of others raise
            return None
        return text if [*map(_kind, _parts(value))] == [*map(_kind, _parts(other))] else None

    def unpacked(self, text: str) -> Any:
        """The value; raises `InvalidRequestError` if nobody has packed it so."""
        kind, _, written = text.partition(":")
        if kind not in ("msgpack", "null"):  # whatever else there is may run code
            raise InvalidRequestError(f"what was packed as {kind!r} is not read")
        try:
            return self._serializer.loads_typed((kind, base64.b64decode(written, validate=True)))
        except Exception as error:  # whatever the types of others raise
            raise InvalidRequestError(f"what a recording holds is damaged, and cannot be read: {error}") from error


def is_private(value: Any) -> bool:
    """Whether a value holds a message that is confidential, or thoughts; or tells that there was one."""
    return any(
        (is_confidential(each) or bool(thoughts_of(each)))
        if isinstance(each, BaseMessage)
        # The message of an entry may have been removed, and its words stand somewhere else.
        else isinstance(each, Mapping) and "handle" in each and bool(each.get("confidential"))
        for each in _parts(value)
    )


def in_words(packed: str) -> str:
    """What was packed, for people to read."""
    return "; ".join(_words(Packing(None).unpacked(packed)))


def _parts(value: Any) -> Iterator[Any]:
    """All that a value is made of, itself included."""
    yield value
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, Send):  # which has no dictionary of its own, nor has a command
        value = [value.arg]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type | str):
        value = vars(value).values()
    for each in value if isinstance(value, Iterable) and not isinstance(value, str | bytes | Iterator) else ():
        yield from _parts(each)


def _kind(value: Any) -> type:
    return list if isinstance(value, tuple) else str if isinstance(value, str) else type(value)


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
