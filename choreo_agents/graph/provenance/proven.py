"""The words and entries of a graph's state, as an agent may believe them."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig

from choreo_agents.engine.messages.seals import Seals
from choreo_agents.graph.provenance.conversation import Conversation
from choreo_agents.graph.provenance.limits import require_few
from choreo_agents.graph.provenance.notary import Notary, notary_of, warn_unproven
from choreo_agents.graph.provenance.notes import claim_of, digest_of, stripped, unproven_of, writer_of
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE


class ProvenState:
    """What was said, and by whom, as far as it is proven to one agent.

    Args:
        state: Of the graph, as the agent gets it.
        config: The agent's.
        seals: Of its engine, for where no graph of ours has a notary.

    Raises:
        InvalidRequestError: The state holds more than `MOST_MESSAGES`.
    """

    def __init__(self, state: Any, config: RunnableConfig, seals: Seals) -> None:
        for name in ("messages", "handles"):
            require_few(name, _channel(state, name))
        entries, messages = list(_channel(state, "handles")), with_ids(_channel(state, "messages"))
        notary = notary_of(config)
        here = (notary or Notary(seals, "")).conversation(config, entries, messages)
        self.conversation: Conversation = here
        held: list[HandleEntry] = []
        others: list[Any] = []
        for entry in entries:
            if here.holds(entry):
                held.append(here.as_encoded(entry))
            else:
                others.append(entry)
        claims = _claims(others)
        if notary is None or not notary.is_guarded:
            # Nobody has judged what came in as input: a message that stands for another now is a client's, or an
            # operator's who has left off whose it was.
            replaced = _replaced(here, held, messages)
            claims |= _claims(entry for entry in held if entry["message_id"] in replaced)
            held = [entry for entry in held if entry["message_id"] not in replaced]
        self.messages = [self._as_proven(message, claims) for message in messages]
        self.superstep = 1 + max((entry["superstep"] for entry in held), default=-1)
        """The earliest that something can be said in now. What was removed since was said all the same: who speaks
        behind it does not stand in its place."""
        self.entries = _still_said(held, self.messages, state)
        if claims or any(unproven_of(message) is not None for message in self.messages):
            warn_unproven(notary.seals if notary else seals)

    def _as_proven(self, message: BaseMessage, claims: Mapping[str, Mapping[str, Any]]) -> BaseMessage:
        known = self.conversation.as_proven(message)
        claimed = claims.get(str(message.id))
        if claimed is None or claim_of(known) is not None or unproven_of(known) is not None:
            return known
        return stripped(known, claimed)


def with_ids(messages: Sequence[Any]) -> list[BaseMessage]:
    """Messages in any form that LangChain takes. Those without an id, which LangGraph would have given, get one that
    is the same for every reader."""
    found = convert_to_messages(messages)
    for place, message in enumerate(found):
        if message.id is None:
            message.id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{place} {message.type} {message.text}"))
    return found


def _channel(state: Any, name: str) -> list[Any]:
    value = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
    return value or []


def _claims(entries: Iterable[Any]) -> dict[str, Mapping[str, Any]]:
    """Whose messages entries say that they are, by message, where that does not count; input is nobody's."""
    return {
        str(entry.get("message_id")): {
            "author": str(entry.get("author")),
            "persona": entry.get("persona"),
            "confidential": bool(entry.get("confidential")),
        }
        for entry in entries
        if isinstance(entry, Mapping) and entry.get("author") != START_SOURCE
    }


def _replaced(here: Conversation, entries: Sequence[HandleEntry], messages: Sequence[BaseMessage]) -> set[str]:
    """Agents' messages in whose places others stand now, which do not prove to be theirs."""
    digests = {entry["message_id"]: entry.get("digest") for entry in entries if entry["author"] != START_SOURCE}
    return {
        str(message.id)
        for message in messages
        if str(message.id) in digests and digests[str(message.id)] != digest_of(message) and not here.proves(message)
    }


def _still_said(entries: list[HandleEntry], messages: Sequence[BaseMessage], state: Any) -> list[HandleEntry]:
    """Entries whose message was not removed since. A `Send` may leave the channel out: then all of them stand.

    A stock graph shows its input to a route from START under other ids than the channel gives it. What branches have
    encoded of it stands for it, where the order of messages allows that.
    """
    if isinstance(state, Mapping) and "messages" not in state:
        return list(entries)
    by_id = {entry["message_id"]: entry for entry in entries}
    present = {message.id for message in messages}
    unnamed: dict[str, deque[HandleEntry]] = {}
    for each in entries:
        if each["author"] == START_SOURCE and each["message_id"] not in present:
            unnamed.setdefault(each.get("digest", ""), deque()).append(each)
    stand_ins: dict[str, str] = {}
    latest = -1
    for message in messages:
        entry = by_id.get(str(message.id))
        is_input = writer_of(message) == START_SOURCE and unproven_of(message) is None
        alike = unnamed.get(digest_of(message)) if entry is None and is_input else None
        if alike and alike[0]["superstep"] >= latest:
            entry = alike.popleft()
        if entry is not None and entry["superstep"] >= latest:
            stand_ins.setdefault(entry["message_id"], str(message.id))
            latest = entry["superstep"]
    present |= stand_ins.keys()
    named = [(e, stand_ins.get(e["message_id"], e["message_id"])) for e in entries if e["message_id"] in present]
    return [e if e["message_id"] == name else HandleEntry(**{**e, "message_id": name}) for e, name in named]
