"""Chat messages that no agent decoded: who said them, and the turns to encode."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Overwrite
from pydantic import BaseModel

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import author_of, run_step_of
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, FramedText

_SIGNATURE, _SIGNED_AT = "choreo_source", "choreo_step"


def sign(output: Any, config: RunnableConfig) -> Any:
    """A plain node's output in any form that LangGraph takes, with the node's name on the messages that it adds.

    What it only hands on stays as it is: agents' messages, people's and instructions with an id, and what is signed.
    """
    marks = {_SIGNATURE: author_of(config, ""), _SIGNED_AT: run_step_of(config)}
    if isinstance(output, Command):
        return dataclasses.replace(output, update=sign(output.update, config))
    if isinstance(output, Mapping):
        return {**output, "messages": _all_signed(output["messages"], marks)} if "messages" in output else output
    if isinstance(output, list | tuple):
        parts = [_pair_signed(part, marks) or sign(part, config) for part in output]
        return parts if isinstance(output, list) else tuple(parts)
    if isinstance(output, BaseModel) and "messages" in type(output).model_fields:
        return output.model_copy(update={"messages": _all_signed(getattr(output, "messages", []), marks)})
    if dataclasses.is_dataclass(output) and not isinstance(output, type) and hasattr(output, "messages"):
        return dataclasses.replace(output, messages=_all_signed(output.messages, marks))
    return output


def _pair_signed(part: Any, marks: Mapping[str, str]) -> tuple[str, Any] | None:
    """A (channel, value) pair of the messages channel, signed; None for anything else."""
    pair = isinstance(part, tuple) and len(part) == 2 and part[0] == "messages"
    return ("messages", _all_signed(part[1], marks)) if pair else None


def _all_signed(added: Any, marks: Mapping[str, str]) -> Any:
    if added is None:
        return None
    if isinstance(added, Overwrite):
        return Overwrite(_all_signed(added.value, marks))
    try:
        messages = convert_to_messages(added if isinstance(added, list) else [added])
    except (NotImplementedError, ValueError) as error:
        # Passed on unsigned it would count as input, and be shown to those from whom its node is hidden.
        raise InvalidRequestError(
            f"node {marks[_SIGNATURE]!r} wrote to messages what is no message: {error}"
        ) from error
    return [_signed(message, marks) for message in messages]


def _signed(message: BaseMessage, marks: Mapping[str, str]) -> BaseMessage:
    handed_on = message.id is not None and message.type in ("human", "system")
    known = _SIGNATURE in message.additional_kwargs or "choreo" in message.response_metadata
    if message.type == "remove" or handed_on or known:
        return message
    return message.model_copy(update={"additional_kwargs": {**message.additional_kwargs, **marks}})


def with_ids(messages: Sequence[Any]) -> list[BaseMessage]:
    """Messages in any form that LangChain takes. Those without an id, which LangGraph would have given, get one that
    is the same for every reader."""
    found = convert_to_messages(messages)
    for place, message in enumerate(found):
        if message.id is None:
            message.id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{place} {message.type} {message.text}"))
    return found


def identified(given: Any) -> Any:
    """A graph's input, its messages with ids: a route from START would otherwise see other ids than the channel has."""
    if not isinstance(given, Mapping) or not given.get("messages"):
        return given
    added = given["messages"]
    try:
        messages = convert_to_messages(added if isinstance(added, list) else [added])
    except (NotImplementedError, ValueError):
        return given  # LangGraph says what is wrong with it
    named = [m if m.id is not None else m.model_copy(update={"id": str(uuid.uuid4())}) for m in messages]
    return {**given, "messages": named}


def writer_of(message: BaseMessage) -> str:
    """Who wrote a message, behind its subgraphs: an agent whose handle was left out, or a plain node; else input."""
    return str(_said(message).get("author") or message.additional_kwargs.get(_SIGNATURE, START_SOURCE))


def are_siblings(one: BaseMessage, other: BaseMessage) -> bool:
    """Whether plain nodes of one superstep wrote both: neither has seen the other."""
    at = one.additional_kwargs.get(_SIGNED_AT)
    return bool(at) and at == other.additional_kwargs.get(_SIGNED_AT)


def persona_of(message: BaseMessage) -> str | None:
    """Whose node said it, if an agent did."""
    return _said(message).get("persona")


def handle_of(message: BaseMessage, model: str) -> MessageHandle | None:
    """What an agent's message was when it was said, as far as it says so itself; `model` if it does not say which."""
    noted = _said(message)
    if not noted.get("handle"):
        return None
    encoder = str(noted.get("model") or model)
    return MessageHandle(id=str(noted["handle"]), model=encoder, length=int(noted.get("length", 1)))


def is_confidential(message: BaseMessage) -> bool:
    """Whether the agent that said it keeps its messages to itself."""
    return bool(_said(message).get("confidential"))


def _said(message: BaseMessage) -> Mapping[str, Any]:
    """What an agent noted on its own message."""
    noted = message.response_metadata.get("choreo")
    return noted if isinstance(noted, Mapping) else {}


def turn_of(message: BaseMessage, chat: ChatFormat) -> FramedText:
    """A message as a chat turn: whatever it says, only the turn's own frame has control tokens.

    Raises:
        InvalidRequestError: It holds anything but text.
    """
    blocks = message.content if isinstance(message.content, list) else []
    if any(isinstance(block, dict) and block.get("type") != "text" for block in blocks):
        raise InvalidRequestError(f"message {message.id!r} holds more than text: only text can be encoded")
    words = str(message.text)
    if isinstance(message, SystemMessage):
        return chat.turn("system", words)
    if isinstance(message, AIMessage):
        header = _said(message).get("header")
        if header is not None:
            said = f"{header}{'' if str(header)[-1:].isspace() else ' '}{words}"
            return chat.assistant.opening(None) + FramedText.words(said) + FramedText.frame(chat.turn_end)
        return chat.turn("assistant", words, _said(message).get("speaker") or message.name)
    return chat.turn("user", words, message.name)


def digest_of(message: BaseMessage) -> str:
    """Tells whether a message's words have changed since they were encoded."""
    words = f"{message.type} {message.name} {message.text}"
    return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]
