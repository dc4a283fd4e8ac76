"""What stands on a chat message about who said it. Anybody can write it: see `conversation` for what is proven."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from choreo_agents.chat import calls_made
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle

NOTED = "choreo"
"""In `response_metadata`: what an agent notes on its own message."""
SOURCE, STEP, SEALS = "choreo_source", "choreo_step", "choreo_seals"
"""In `additional_kwargs`: what a plain node's message is signed with."""
CONFIDENTIAL = "choreo_confidential"
"""There also, of what the function of a confidential agent has made of its messages."""
SIGNED = (SOURCE, STEP, SEALS, CONFIDENTIAL)
UNPROVEN = "unproven"
"""In an agent's notes: whose message it says that it is, where no seal proves it."""
REASONING = "reasoning"
"""The kind of block that holds thoughts, and where it has their text, as LangChain calls them."""
_OPENINGS = ("speaker", "header")
_encode = json.JSONEncoder(sort_keys=True, default=str).encode


@dataclass(frozen=True)
class Claim:
    """Who a message says has said it."""

    author: str
    """A node, behind the subgraphs that it stands in."""
    persona: str | None
    """Whose node that is, if it is an agent's."""
    confidential: bool
    seals: Mapping[str, Any]
    rest: Mapping[str, Any]
    """What else is noted, to be believed only if a seal proves it: its handle, how its turn starts, its step."""


def claim_of(message: BaseMessage) -> Claim | None:
    """Who a message says has said it; None: it says nothing, as input does."""
    noted = said(message)
    if "author" in noted:
        rest = {name: noted[name] for name in ("handle", "model", "length", *_OPENINGS) if name in noted}
        persona = noted.get("persona")
        return Claim(
            str(noted["author"]),
            None if persona is None else str(persona),
            bool(noted.get("confidential")),
            _mapping(noted.get("seals")),
            rest,
        )
    signed = message.additional_kwargs
    if SOURCE not in signed:
        return None
    is_marked = bool(signed.get(CONFIDENTIAL))
    return Claim(str(signed[SOURCE]), None, is_marked, _mapping(signed.get(SEALS)), {"step": signed.get(STEP)})


def stripped(message: BaseMessage, unproven: Mapping[str, Any] | None = None) -> BaseMessage:
    """A message that says nothing of who said it, but for what nobody could prove."""
    metadata = {name: value for name, value in message.response_metadata.items() if name != NOTED}
    signed = {name: value for name, value in message.additional_kwargs.items() if name not in SIGNED}
    if unproven is not None:
        metadata[NOTED] = {UNPROVEN: dict(unproven)}
    return message.model_copy(update={"response_metadata": metadata, "additional_kwargs": signed})


def said(message: BaseMessage) -> Mapping[str, Any]:
    """What an agent noted on its own message."""
    return _mapping(message.response_metadata.get(NOTED))


def opening_of(message: BaseMessage) -> Mapping[str, Any]:
    """How its turn starts, as its speaker noted: with a `speaker`'s name, or a `header`."""
    return {name: said(message)[name] for name in _OPENINGS if name in said(message)}


def writer_of(message: BaseMessage) -> str:
    """Who wrote a message, behind its subgraphs: an agent whose handle was left out, or a plain node; else input."""
    return str(said(message).get("author") or message.additional_kwargs.get(SOURCE, START_SOURCE))


def are_siblings(one: BaseMessage, other: BaseMessage) -> bool:
    """Whether plain nodes of one superstep wrote both: neither has seen the other."""
    at = one.additional_kwargs.get(STEP)
    return bool(at) and at == other.additional_kwargs.get(STEP)


def persona_of(message: BaseMessage) -> str | None:
    """Whose node said it, if an agent did."""
    return said(message).get("persona")


def unproven_of(message: BaseMessage) -> Mapping[str, Any] | None:
    """Who it says has said it, where no seal proves it."""
    found = said(message).get(UNPROVEN)
    return found if isinstance(found, Mapping) else None


def handle_of(message: BaseMessage, model: str) -> MessageHandle | None:
    """What an agent's message was when it was said, as far as it says so itself; `model` if it does not say which."""
    noted = said(message)
    if not noted.get("handle"):
        return None
    encoder = str(noted.get("model") or model)
    return MessageHandle(id=str(noted["handle"]), model=encoder, length=int(noted.get("length", 1)))


def is_confidential(message: BaseMessage) -> bool:
    """Whether the agent that said it keeps its messages to itself."""
    claim = claim_of(message)
    return bool((unproven_of(message) or {}).get("confidential")) or (claim is not None and claim.confidential)


def is_edited(message: BaseMessage) -> bool:
    """Whether its words are no longer those that were sealed."""
    claim = claim_of(message)
    return claim is not None and claim.seals.get("digest") != digest_of(message)


def digest_of(message: BaseMessage) -> str:
    """Tells whether a message's words, calls or the thoughts beside them have changed since they were encoded."""
    said: list[Any] = [message.type, message.name, str(message.text)]
    if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
        said.append([[call["name"], call["args"], call["id"]] for call in message.tool_calls])
        said.append([[call["name"], call["args"], call["id"]] for call in message.invalid_tool_calls])
    if isinstance(message, AIMessage) and (others := calls_made(message)[len(message.tool_calls) :]):
        said.append([[call.name, dict(call.arguments), call.id] for call in others])
    if isinstance(message, ToolMessage):
        said.append(message.tool_call_id)
    words, thoughts = _digest(said), thoughts_in(message)
    return f"{words}.{_digest(thoughts)}" if thoughts else words


def drops_thoughts(message: BaseMessage, digest: str | None) -> bool:
    """Whether a message has the words that a digest was made of, and no thoughts, of which there were some."""
    words, had_thoughts, _ = (digest or "").partition(".")
    return bool(had_thoughts) and digest_of(message) == words


def thoughts_in(message: BaseMessage) -> str:
    """What was thought before a message was said, as far as that stands in it."""
    blocks = message.content if isinstance(message.content, list) else []
    found = [block for block in blocks if isinstance(block, dict) and block.get("type") == REASONING]
    return "".join(str(block.get(REASONING, "")) for block in found)


def _digest(said: Any) -> str:
    return hashlib.sha256(_encode(said).encode()).hexdigest()[:32]


def _mapping(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}
