"""`send`: a LangGraph `Send` that chooses which messages its target sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langgraph.types import Send

from choreo_agents.arguments import nearest, require_known
from choreo_agents.errors import InvalidRequestError, UnknownHandleError
from choreo_agents.graph.state import SENT_AT, HandleEntry, handles_of
from choreo_agents.graph.view.view import calls_of, said_at
from choreo_agents.graph.visibility import REENCODED, SHARED
from choreo_agents.kv.handle import MessageHandle

INSTRUCTION, SPEAKER = "choreo_instruction", "choreo_speaker"
"""State keys of one instance of a worker: its prompt, and its name."""
Selected = HandleEntry | MessageHandle | str
"""An entry of the `handles` channel, its handle, or the id of its message."""


def send(
    node: str,
    state: Mapping[str, Any],
    *,
    shared: Iterable[Selected] = (),
    reencoded: Iterable[Selected] = (),
    **update: Any,
) -> Send:
    """Send one branch to a node, with a choice of messages.

    The choice cannot widen the declared visibility: the node then raises `VisibilityError`.

    Args:
        node: Target agent: each branch is a reader of its own. A target graph takes `shared` only, and its agents see
            these as declared.
        state: State, as the routing function gets it.
        shared: Messages that it attends to as they were encoded.
        reencoded: Messages that are encoded again from their text for it.
        **update: Other changes of its state: `messages=[...]` adds input of its own.

    Raises:
        UnknownHandleError: The state has no such message.
        InvalidRequestError: A message is chosen twice, or `handles` is passed.
    """
    if "handles" in update:
        raise InvalidRequestError("pass the messages to send as shared= and reencoded=, not as handles=")
    if slips := [name for name in update if name not in state and nearest(name, ("shared", "reencoded"))]:
        require_known("send", slips, ("shared", "reencoded"))
    entries: list[HandleEntry] = list(state.get("handles") or [])
    # Also a branch without messages comes after all present ones, including those that were removed since.
    after = 1 + max((entry["superstep"] for entry in entries), default=-1)
    if "messages" in state:
        present = {message.id for message in state["messages"] or []}
        entries = [entry for entry in entries if entry["message_id"] in present]
    at = said_at(entries, calls_of(state.get("messages") or []))
    chosen: dict[str, HandleEntry] = {}
    for mode, items in ((SHARED, shared), (REENCODED, reencoded)):
        if isinstance(items, str | Mapping):
            raise InvalidRequestError(f"{mode.name} must be a list of messages, not {items!r:.80}")
        for item in items:
            entry = _find_entry(item, entries)
            if entry["message_id"] in chosen:
                raise InvalidRequestError(f"message {entry['message_id']!r} is sent twice: pass it once")
            behind = _supersteps_since(entry, entries, at)
            chosen[entry["message_id"]] = HandleEntry(**{**entry, "select": mode.name, "behind": behind})
    messages = [message for message in state.get("messages") or [] if message.id in chosen]
    added = update.pop("messages", [])
    messages += added if isinstance(added, list) else [added]
    return Send(node, {**state, **update, "handles": list(chosen.values()), "messages": messages, SENT_AT: after})


def sent_text(state: Any, key: str) -> str | None:
    """Return the text that an instance was sent under a key."""
    value = state.get(key) if isinstance(state, Mapping) else None
    return None if value is None else str(value)


def _supersteps_since(entry: HandleEntry, entries: Iterable[HandleEntry], at: Mapping[str, int]) -> int:
    """Return the number of later supersteps with a message of the same author."""
    spoken = {at[item["message_id"]] for item in entries if item["author"] == entry["author"]}
    return sum(step > at[entry["message_id"]] for step in spoken)


def _find_entry(item: Selected, entries: list[HandleEntry]) -> HandleEntry:
    """Return the entry that a choice names."""
    if isinstance(item, MessageHandle):
        name: object = item.id
        matching = [entry for entry in entries if name in {handle.id for handle in handles_of(entry)}]
    else:
        name = item.get("message_id") if isinstance(item, Mapping) else item
        matching = [entry for entry in entries if entry["message_id"] == name]
    if not matching:
        raise UnknownHandleError(f"the state has no message {name!r}: pass one of state['handles']")
    return matching[0]
