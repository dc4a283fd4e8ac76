"""What functions take and return, as a file has it: digests of the one, the other packed by LangGraph's serializer.

A message or an entry that stood in the state is packed as a reference to it: a run that is played again has its own.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Overwrite, Send
from pydantic import BaseModel

from choreo_agents.graph.langgraph_internals import overwritten, strict_serializer
from choreo_agents.graph.message_names import with_id
from choreo_agents.graph.provenance.notes import digest_of, is_confidential, thoughts_in
from choreo_agents.graph.provenance.updates import listed_messages, rewritten

_REFERENCE = "choreo_recorded"
_OF_A_SEND = ("select", "behind")
"""What an entry says of how it is handed on."""


class Packing:
    """Of one graph: packs what its own schemas are made of, and unpacks nothing else.

    Args:
        builder: The graph's; None: of no graph, so that types of its own come as the plain values they were packed as.
    """

    def __init__(self, builder: Any) -> None:
        self._serializer = strict_serializer(builder)

    def packed(self, value: Any) -> str | None:
        """A value as text; None if it could not be read back as it is."""
        try:
            kind, written = self._serializer.dumps_typed(_boxed(value))
        except Exception:  # whatever the types of others raise
            return None
        text = f"{kind}:{base64.b64encode(written).decode()}"
        return text if kind == "msgpack" and _alike(value, self.unpacked(text)) else None if value is not None else text

    def unpacked(self, text: str) -> Any:
        """The value."""
        kind, _, written = text.partition(":")
        if kind not in ("msgpack", "null"):  # whatever else there is may run code
            raise ValueError(f"what was packed as {kind!r} is not read")
        return _unboxed(self._serializer.loads_typed((kind, base64.b64decode(written))))


def canonical(value: Any) -> Any:  # noqa: PLR0911 - a line for each kind
    """A value as JSON has it, without what differs from run to run: ids, handles, seals, what something cost."""
    if isinstance(value, BaseMessage):
        return ["message", value.type, value.name, _plain(value.content), _called(value)]
    if is_entry(value):
        return ["entry", *(value.get(name) for name in ("author", "superstep", "branch", "call", "confidential"))]
    if isinstance(value, Send):
        return ["send", value.node, canonical(value.arg)]
    if isinstance(value, Overwrite):
        return ["overwrite", canonical(value.value)]
    if isinstance(value, Mapping):
        return {str(name): canonical(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((canonical(each) for each in value), key=repr)
    if isinstance(value, BaseModel):
        return [type(value).__name__, {name: canonical(getattr(value, name)) for name in type(value).model_fields}]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [type(value).__name__, {each.name: canonical(getattr(value, each.name)) for each in fields}]
    return _plain(value)


def is_entry(value: Any) -> bool:
    """Whether it is an entry of the `handles` channel."""
    return isinstance(value, Mapping) and {"handle", "author", "message_id"} <= value.keys()


def hides(value: Any) -> bool:
    """Whether a value holds a message that is confidential, or thoughts."""
    return any(isinstance(each, BaseMessage) and (is_confidential(each) or thoughts_in(each)) for each in parts(value))


def tells(value: Any) -> bool:
    """Whether a value holds text that is no reference, no name of a node and no name of a field."""
    return any(isinstance(each, str | bytes | BaseMessage) and each != "" for each in parts(value))


def parts(value: Any) -> Iterator[Any]:
    """All that a value is made of, itself included; of references, of routes and of fields nothing but what they are
    of."""
    yield value
    if isinstance(value, Mapping):
        inner = [] if _REFERENCE in value else list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    elif isinstance(value, Send):
        inner = [value.arg]
    elif isinstance(value, Command):
        sent = value.goto if isinstance(value.goto, list | tuple) else [value.goto]
        inner = [value.update, value.resume, *(each for each in sent if isinstance(each, Send))]
    elif isinstance(value, Overwrite):
        inner = [value.value]
    elif isinstance(value, BaseModel) and not isinstance(value, BaseMessage):
        inner = [getattr(value, name) for name in type(value).model_fields]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, each.name) for each in dataclasses.fields(value)]
    else:
        inner = []
    for each in inner:
        yield from parts(each)


def named(value: Any, config: RunnableConfig) -> Any:
    """What a node with this config returned, with ids for all messages: by them they are known in other runs."""

    def listed(written: Any) -> Any:
        is_overwrite, given = overwritten(written)
        try:
            messages = [*listed_messages(given)]
        except (NotImplementedError, ValueError):
            return written  # whoever signs it says what is wrong with it
        return Overwrite(messages) if is_overwrite else messages

    def sent(each: Any) -> Any:
        if isinstance(each, Send):
            return Send(each.node, named(each.arg, config))
        return with_id(each, config) if isinstance(each, BaseMessage) else each

    return _rebuilt(rewritten(value, {"messages": listed}), sent)


def referring(value: Any, *states: Any) -> Any:
    """A value in which what stands in a state is named, and not told again."""
    messages = {each.id: digest_of(each) for each in parts(states) if isinstance(each, BaseMessage) and each.id}
    entries = {each["message_id"] for each in parts(states) if is_entry(each)}

    def refer(each: Any) -> Any:
        if isinstance(each, BaseMessage) and each.id in messages and messages[each.id] == digest_of(each):
            return {_REFERENCE: "message", "id": each.id}
        if is_entry(each) and each["message_id"] in entries:
            told = {name: each[name] for name in _OF_A_SEND if name in each}
            return {_REFERENCE: "entry", "id": each["message_id"], **told}
        return each

    return _rebuilt(value, refer)


def resolved(value: Any, *states: Any) -> Any:
    """A value in which states of this run stand for the references.

    Raises:
        LookupError: They have no such message.
    """
    messages = {each.id: each for each in parts(states) if isinstance(each, BaseMessage)}
    entries = {each["message_id"]: each for each in parts(states) if is_entry(each)}

    def resolve(each: Any) -> Any:
        if not isinstance(each, Mapping) or _REFERENCE not in each:
            return each
        if each[_REFERENCE] == "message":
            return messages[each["id"]]
        told = {name: each[name] for name in _OF_A_SEND if name in each}
        return {**entries[each["id"]], **told}

    return _rebuilt(value, resolve)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:  # noqa: PLR0911 - a line for each kind
    """A value with others in the place of its parts, as far as those are plain or LangGraph's."""
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, dict):
        return {name: _rebuilt(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_rebuilt(each, change) for each in value]
    if type(value) is tuple:
        return tuple(_rebuilt(each, change) for each in value)
    if isinstance(value, Send):
        return Send(value.node, _rebuilt(value.arg, change))
    if isinstance(value, Command):
        update, goto = _rebuilt(value.update, change), _rebuilt(value.goto, change)
        return dataclasses.replace(value, update=update, goto=goto)
    if isinstance(value, Overwrite):
        return Overwrite(_rebuilt(value.value, change))
    return value


def _boxed(value: Any) -> Any:
    """A value whose tuples are told from lists, which msgpack does not do."""

    def box(each: Any) -> Any:
        return {_REFERENCE: "tuple", "parts": [_boxed(part) for part in each]} if type(each) is tuple else each

    return _rebuilt(value, box)


def _unboxed(value: Any) -> Any:
    def unbox(each: Any) -> Any:
        is_box = isinstance(each, dict) and each.get(_REFERENCE) == "tuple"
        return tuple(_unboxed(part) for part in each["parts"]) if is_box else each

    return _rebuilt(value, unbox)


def _called(message: BaseMessage) -> Any:
    if isinstance(message, ToolMessage):
        return [message.tool_call_id, message.status, _plain(message.artifact)]
    if isinstance(message, AIMessage):
        return [[call["name"], _plain(call["args"]), call["id"]] for call in message.tool_calls]
    return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [type(value).__name__, repr(value)]


def _alike(value: Any, other: Any) -> bool:
    """Whether what was read back is of the types that were packed."""
    ours, theirs = [type(each) for each in parts(value)], [type(each) for each in parts(other)]
    return ours == theirs
