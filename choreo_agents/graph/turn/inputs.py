"""Chat messages that no agent decoded: who said them, and the turns to encode."""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Overwrite
from pydantic import BaseModel

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import author_of, channel_before, run_step_of
from choreo_agents.graph.turn.authorship import Authorship
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat

_SIGNATURE, _SIGNED_AT, _NOTED = "choreo_source", "choreo_step", "choreo"


def sign(output: Any, config: RunnableConfig, persona: str | None = None) -> Any:
    """A plain node's output in any form that LangGraph takes, with the node's name on the messages that it adds.

    What it only hands on stays as it is: what stands in the state, people's and instructions with an id, and what was
    said inside of it. What an agent said in other words is the node's own, unless it is one of that agent's.

    Args:
        output: What it returned.
        config: Its own.
        persona: Whose node it is declared to be; None: its own.
    """
    node = author_of(config, "")
    home = node.rpartition("|")[0]
    declared = f"{home}|{persona}" if home and persona else persona
    return _with_signatures(output, _Signature(Authorship(node, declared), config))


def _with_signatures(output: Any, signature: _Signature) -> Any:
    if isinstance(output, Command):
        return dataclasses.replace(output, update=_with_signatures(output.update, signature))
    if isinstance(output, Mapping):
        return {**output, "messages": signature.on_all(output["messages"])} if "messages" in output else output
    if isinstance(output, list | tuple):
        parts = [_pair_signed(part, signature) or _with_signatures(part, signature) for part in output]
        return parts if isinstance(output, list) else tuple(parts)
    if isinstance(output, BaseModel) and "messages" in type(output).model_fields:
        return output.model_copy(update={"messages": signature.on_all(getattr(output, "messages", []))})
    if dataclasses.is_dataclass(output) and not isinstance(output, type) and hasattr(output, "messages"):
        return dataclasses.replace(output, messages=signature.on_all(output.messages))
    return output


def _pair_signed(part: Any, signature: _Signature) -> tuple[str, Any] | None:
    """A (channel, value) pair of the messages channel, signed; None for anything else."""
    pair = isinstance(part, tuple) and len(part) == 2 and part[0] == "messages"
    return ("messages", signature.on_all(part[1])) if pair else None


class _Signature:
    """Of one execution of one plain node."""

    def __init__(self, authorship: Authorship, config: RunnableConfig) -> None:
        self._authorship = authorship
        self._config = config
        self._marks = {_SIGNATURE: authorship.node, _SIGNED_AT: run_step_of(config)}

    @cached_property
    def _standing(self) -> Mapping[str | None, BaseMessage]:
        """What was said before it ran, by id."""
        found = channel_before(self._config, "messages")
        return {message.id: message for message in found or () if isinstance(message, BaseMessage)}

    def on_all(self, added: Any) -> Any:
        if added is None:
            return None
        if isinstance(added, Overwrite):
            return Overwrite(self.on_all(added.value))
        try:
            messages = convert_to_messages(added if isinstance(added, list) else [added])
        except (NotImplementedError, ValueError) as error:
            # Passed on unsigned it would count as input, and be shown to those from whom its node is hidden.
            node = self._authorship.node
            raise InvalidRequestError(f"node {node!r} wrote to messages what is no message: {error}") from error
        return [message if message.type == "remove" else self._on(message) for message in messages]

    def _on(self, message: BaseMessage) -> BaseMessage:
        standing = None if message.id is None else self._standing.get(message.id)
        said = _claims(message)
        if standing is not None and (digest_of(standing) == digest_of(message) or self._covers(standing)):
            return message if said == _claims(standing) else standing.model_copy(update={"content": message.content})
        if said and self._covers(message):
            return message
        is_anothers = standing is not None and _claims(standing)
        if message.id is not None and message.type in ("human", "system") and not said and not is_anothers:
            return message
        noted = {name: value for name, value in message.response_metadata.items() if name != _NOTED}
        marked = {**message.additional_kwargs, **self._marks}
        return message.model_copy(update={"additional_kwargs": marked, "response_metadata": noted})

    def _covers(self, message: BaseMessage) -> bool:
        return bool(_claims(message)) and self._authorship.covers(writer_of(message), persona_of(message))


def _claims(message: BaseMessage) -> tuple[Any, ...]:
    """Whose a message says that it is; empty if it says nothing of that."""
    signed, noted = message.additional_kwargs.get(_SIGNATURE), message.response_metadata.get(_NOTED)
    return () if signed is None and noted is None else (signed, noted)


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
    noted = message.response_metadata.get(_NOTED)
    return noted if isinstance(noted, Mapping) else {}


def turn_of(message: BaseMessage, chat: ChatFormat) -> str:
    """A message as a chat turn.

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
            return f"{header}{'' if str(header)[-1:].isspace() else ' '}{words}{chat.turn_end}"
        return chat.turn("assistant", words, _said(message).get("speaker") or message.name)
    return chat.turn("user", words, message.name)


def digest_of(message: BaseMessage) -> str:
    """Tells whether a message's words have changed since they were encoded."""
    words = f"{message.type} {message.name} {message.text}"
    return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]
