"""A `Send` that says which messages its target is to see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langgraph.types import Send

from choreo_agents.arguments import nearest, require_known
from choreo_agents.errors import InvalidRequestError, UnknownHandleError
from choreo_agents.graph.state import HandleEntry, handles_of
from choreo_agents.graph.view.view import said_at
from choreo_agents.graph.visibility import REENCODED, SHARED
from choreo_agents.graph.words.entries import calls_of
from choreo_agents.kv.handle import MessageHandle

_SENT_AT = "choreo_sent_at"
INSTRUCTION, SPEAKER = "choreo_instruction", "choreo_speaker"
"""What tells one instance of a worker from the others: what it is asked, and the name that it speaks under."""
Selected = HandleEntry | MessageHandle | str
"""An entry of the `handles` channel, its handle, or the id of the message that mirrors it."""


def send(
    node: str,
    state: Mapping[str, Any],
    *,
    shared: Iterable[Selected] = (),
    reencoded: Iterable[Selected] = (),
    **update: Any,
) -> Send:
    """Send one branch to a node, with a choice of what was said.

    The choice never widens what the graph lets the node see: more than that is a `VisibilityError` when it runs.

    Args:
        node: The target, an agent: each branch is a reader of its own. A graph takes shared ones, and its agents see
            these as is declared.
        state: The state, as the routing function has it.
        shared: Messages that it attends to as they were encoded.
        reencoded: Messages that it attends to in a fresh encoding of their words.
        **update: What else differs in the state that it gets: `messages=[...]` adds input of its own.

    Raises:
        UnknownHandleError: The state has no such message.
        InvalidRequestError: A message is chosen twice, or `handles` is given otherwise.
    """
    if "handles" in update:
        raise InvalidRequestError("say which messages to send by shared= and reencoded=, not by handles=")
    if slips := [name for name in update if name not in state and nearest(name, ("shared", "reencoded"))]:
        require_known("send", slips, ("shared", "reencoded"))
    entries: list[HandleEntry] = list(state.get("handles") or [])
    # A branch that was sent nothing speaks after all that was said, too, also where that was removed since.
    after = 1 + max((entry["superstep"] for entry in entries), default=-1)
    if "messages" in state:
        present = {message.id for message in state["messages"] or []}
        entries = [entry for entry in entries if entry["message_id"] in present]
    at = said_at(entries, calls_of(state.get("messages") or []))
    chosen: dict[str, HandleEntry] = {}
    for mode, items in ((SHARED, shared), (REENCODED, reencoded)):
        if isinstance(items, str | Mapping):
            raise InvalidRequestError(f"{mode.name} must be a list of messages, not {items!r:.80} alone")
        for item in items:
            entry = _entry(item, entries)
            if entry["message_id"] in chosen:
                raise InvalidRequestError(f"message {entry['message_id']!r} is sent twice: choose it once")
            behind = _behind(entry, entries, at)
            chosen[entry["message_id"]] = HandleEntry(**{**entry, "select": mode.name, "behind": behind})
    messages = [message for message in state.get("messages") or [] if message.id in chosen]
    added = update.pop("messages", [])
    messages += added if isinstance(added, list) else [added]
    return Send(node, {**state, **update, "handles": list(chosen.values()), "messages": messages, _SENT_AT: after})


def sent_at(state: Any) -> int:
    """The earliest superstep of what a branch says; 0 if it was not sent."""
    return int(state.get(_SENT_AT, 0)) if isinstance(state, Mapping) else 0


def sent(state: Any, key: str) -> str | None:
    """What an instance was sent under a key."""
    found = state.get(key) if isinstance(state, Mapping) else None
    return None if found is None else str(found)


def _behind(entry: HandleEntry, entries: Iterable[HandleEntry], at: Mapping[str, int]) -> int:
    """In how many later supersteps its author has spoken."""
    spoken = {at[each["message_id"]] for each in entries if each["author"] == entry["author"]}
    return sum(step > at[entry["message_id"]] for step in spoken)


def _entry(item: Selected, entries: list[HandleEntry]) -> HandleEntry:
    """The entry that a choice names."""
    if isinstance(item, Mapping):
        key, wanted = "message_id", item.get("message_id")
    elif isinstance(item, MessageHandle):
        key, wanted = "handle", item.id
    else:
        key, wanted = "message_id", item
    for entry in entries:
        named = {each.id for each in handles_of(entry)} if key == "handle" else {entry["message_id"]}
        if wanted in named:
            return entry
    raise UnknownHandleError(f"the state has no message {wanted!r}: choose from state['handles']")
