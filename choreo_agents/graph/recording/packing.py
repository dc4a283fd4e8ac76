"""What functions take and return, as a file has it: digests of the one, the other packed by LangGraph's serializer.

A message or an entry that stood in the state is packed as a reference to it: a run that is played again has its own.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from datetime import date, time, timedelta
from enum import Enum
from numbers import Number
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.base import TextAccessor
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Overwrite, Send
from pydantic import BaseModel

from choreo_agents.chat import thoughts_said
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import overwritten, strict_serializer
from choreo_agents.graph.message_names import with_id
from choreo_agents.graph.provenance import MARK, digest_of, is_confidential, listed_messages, rewritten
from choreo_agents.graph.state import OF_A_SEND

_REFERENCE = "choreo_recorded"
_CHANGED = "changed"
_NOTES = ("additional_kwargs", "response_metadata")
"""Fields of a message that hold our own notes beside what others note."""
_SILENT = (Number, Enum, date, time, timedelta, Mapping, list, tuple, set, frozenset, Send, Command, Overwrite)


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
        """The value; raises `InvalidRequestError` if nobody has packed it so."""
        kind, _, written = text.partition(":")
        if kind not in ("msgpack", "null"):  # whatever else there is may run code
            raise InvalidRequestError(f"what was packed as {kind!r} is not read")
        try:
            return _unboxed(self._serializer.loads_typed((kind, base64.b64decode(written, validate=True))))
        except Exception as error:  # whatever the types of others raise
            raise InvalidRequestError(f"what a recording holds is damaged, and cannot be read: {error}") from error


def canonical(value: Any) -> Any:  # noqa: PLR0911 - a line for each kind
    """A value as JSON has it, without what differs from run to run: ids, handles, signatures, what something cost."""
    if isinstance(value, BaseMessage):
        rest = {name: _plain(each) for name, each in value.additional_kwargs.items() if not name.startswith(MARK)}
        return ["message", value.type, value.name, _plain(value.content), _called(value), rest]
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
        return [type(value).__name__, {name: canonical(each) for name, each in _fields(value).items()}]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [type(value).__name__, {each.name: canonical(getattr(value, each.name)) for each in fields}]
    return _plain(value)


def is_entry(value: Any) -> bool:
    """Whether it is an entry of the `handles` channel."""
    return isinstance(value, Mapping) and {"handle", "author", "message_id"} <= value.keys()


def hides(value: Any) -> bool:
    """Whether a value holds a message that is confidential, or thoughts; or tells that there was one."""
    for each in parts(value):
        if isinstance(each, BaseMessage) and (is_confidential(each) or thoughts_said(each)):
            return True
        if is_entry(each) and each.get("confidential"):
            return True  # its message may have been removed, and its words stand somewhere else
    return False


def tells(value: Any) -> bool:
    """Whether a value holds text that is no reference, no name of a node and no name of a field.

    Whatever nobody knows counts as text; so do the keys of mappings that are no update of a state.
    """
    written = {id(each) for each in _updates(value)}
    return any(
        _is_key_of_text(each) if isinstance(each, Mapping) and id(each) not in written else not _is_silent(each)
        for each in parts(value)
    )


def parts(value: Any) -> Iterator[Any]:
    """All that a value is made of, itself included; of references, of routes and of fields nothing but what they are
    of."""
    yield value
    if isinstance(value, Mapping):
        inner = [value.get(_CHANGED)] if _REFERENCE in value else list(value.values())
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
        inner = [*_fields(value).values()]
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
    messages = {each.id: each for each in parts(states) if isinstance(each, BaseMessage) and each.id}
    entries = {each["message_id"] for each in parts(states) if is_entry(each)}

    def refer(each: Any) -> Any:
        if isinstance(each, BaseMessage) and each.id in messages and digest_of(messages[each.id]) == digest_of(each):
            changed = _changed(messages[each.id], each)
            return {_REFERENCE: "message", "id": each.id, **({_CHANGED: changed} if changed else {})}
        if is_entry(each) and each["message_id"] in entries:
            told = {name: each[name] for name in OF_A_SEND if name in each}
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
            return _with_changes(messages[each["id"]], each.get(_CHANGED) or {})
        told = {name: each[name] for name in OF_A_SEND if name in each}
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
    """A value whose tuples are told from lists, which msgpack does not do, and whose text is plain."""

    def box(each: Any) -> Any:
        if type(each) is TextAccessor:  # what `message.text` is
            return str(each)
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
        made = [*message.tool_calls, *message.invalid_tool_calls]
        return [[call["name"], _plain(call["args"]), call["id"]] for call in made]
    return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if hasattr(value, "tolist"):  # an array or a tensor: how it is shown leaves most of it out
        return [type(value).__name__, str(getattr(value, "dtype", "")), _plain(value.tolist())]
    return [type(value).__name__, repr(value)]


def _alike(value: Any, other: Any) -> bool:
    """Whether what was read back is of the types that were packed."""
    ours = [str if type(each) is TextAccessor else type(each) for each in parts(value)]
    return ours == [type(each) for each in parts(other)]


def _fields(model: BaseModel) -> Mapping[str, Any]:
    """Of a model of Pydantic's, those that it was not declared with included."""
    return {**{name: getattr(model, name) for name in type(model).model_fields}, **(model.model_extra or {})}


def _updates(value: Any) -> Iterator[Mapping[Any, Any]]:
    """The updates of a state, and the states that are sent: their keys are names of channels."""
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _updates(each)
    elif isinstance(value, Send):
        yield from _updates(value.arg)
    elif isinstance(value, Command):
        yield from _updates(value.update)
        yield from _updates([each for each in _listed(value.goto) if isinstance(each, Send)])


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _is_key_of_text(mapping: Mapping[Any, Any]) -> bool:
    return _REFERENCE not in mapping and any(not isinstance(name, int | float) for name in mapping)


def _is_silent(value: Any) -> bool:
    """Whether a value tells nothing in words beside what its parts do."""
    if isinstance(value, str | bytes):
        return not value
    if isinstance(value, BaseModel):
        return not isinstance(value, BaseMessage)
    return value is None or dataclasses.is_dataclass(value) or isinstance(value, _SILENT)


def _changed(before: BaseMessage, now: BaseMessage) -> dict[str, Any]:
    """What of a message is another beside its words, by field."""
    found: dict[str, Any] = {}
    for name in type(now).model_fields:
        one: Any = getattr(before, name, None)
        other: Any = getattr(now, name)
        if name in _NOTES:
            new = {key: each for key, each in other.items() if key not in one or canonical(one[key]) != canonical(each)}
            gone = [key for key in one if key not in other]
            if new or gone:
                found[name] = {"new": new, "gone": gone}
        elif canonical(one) != canonical(other):
            found[name] = other
    return found


def _with_changes(message: BaseMessage, changed: Mapping[str, Any]) -> BaseMessage:
    """A message with what `_changed` has found."""
    fields = dict(changed)
    for name in _NOTES:
        if name in fields:
            kept = {key: each for key, each in getattr(message, name).items() if key not in fields[name]["gone"]}
            fields[name] = kept | fields[name]["new"]
    return message.model_copy(update=fields) if fields else message
