"""Serialization of run inputs in recordings, by LangGraph's serializer restricted to the types of a graph's schemas."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.messages import BaseMessage
from langgraph.types import Send

from choreo_agents.chat import thoughts_of
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import strict_serializer
from choreo_agents.graph.signer import is_confidential


def pack(value: Any, builder: Any = None) -> str | None:
    """Return a value as text; None if it would not be restored equal in type (tuples may become lists).

    Args:
        value: The value.
        builder: Builder of the graph whose schemas name the types that are restored; None: only plain values are.
    """
    try:
        kind, data = strict_serializer(builder).dumps_typed(value)
        text = f"{kind}:{base64.b64encode(data).decode()}"
        restored = unpack(text, builder)
    except Exception:  # user-defined types may raise anything
        return None
    return text if [*map(_kind, _parts(value))] == [*map(_kind, _parts(restored))] else None


def unpack(text: str, builder: Any = None) -> Any:
    """Return the value of a text; raises `InvalidRequestError` if the text is no packed value."""
    kind, _, written = text.partition(":")
    if kind not in ("msgpack", "null"):  # other kinds, such as pickle, may run code
        raise InvalidRequestError(f"values packed as {kind!r} cannot be read")
    serializer = strict_serializer(builder)
    try:
        return serializer.loads_typed((kind, base64.b64decode(written, validate=True)))
    except Exception as error:  # user-defined types may raise anything
        raise InvalidRequestError(f"a value of the recording is damaged: {error}") from error


def is_private(value: Any) -> bool:
    """Return whether a value holds a confidential message or thoughts, or the entry of a confidential message."""
    return any(
        (is_confidential(part) or bool(thoughts_of(part)))
        if isinstance(part, BaseMessage)
        # Even if the message was removed: its text may stand elsewhere in the value.
        else isinstance(part, Mapping) and "handle" in part and bool(part.get("confidential"))
        for part in _parts(value)
    )


def describe_packed(packed: str) -> str:
    """Return a packed value as text for people: JSON, in which a message is its text."""
    value = unpack(packed)
    return json.dumps(value, ensure_ascii=False, skipkeys=True, default=lambda part: getattr(part, "text", repr(part)))


def _parts(value: Any) -> Iterator[Any]:
    """Yield a value and all values in it, recursively."""
    yield value
    if isinstance(value, Mapping):
        value = value.values()
    elif isinstance(value, Send):  # it has no `__dict__`; neither has a `Command`, which is a dataclass
        value = [value.arg]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, member.name) for member in dataclasses.fields(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type | str):
        value = vars(value).values()
    for part in value if isinstance(value, Iterable) and not isinstance(value, str | bytes | Iterator) else ():
        yield from _parts(part)


def _kind(value: Any) -> type:
    return list if isinstance(value, tuple) else str if isinstance(value, str) else type(value)
