"""Entries of the `handles` channel: made of encoded messages, compared with the state, assigned to callers of tools."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.messages import BaseMessage, ToolMessage

from choreo_agents.chat import thoughts_of, tool_calls_of
from choreo_agents.engine import Engine
from choreo_agents.errors import ForeignHandleError, HandleError, UnknownHandleError
from choreo_agents.graph.signer import are_siblings, digest_of, is_edited, persona_of, unproven_of, writer_of
from choreo_agents.graph.state import HandleEntry, handle_for, with_edited_text, with_handle
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle


def entry_of(
    handle: MessageHandle,
    author: str,
    superstep: int,
    message: BaseMessage,
    *,
    branch: int,
    task_path: Sequence[int],
    confidential: bool,
    call: int = 0,
    **fields: Any,
) -> HandleEntry:
    """Return the entry of a message in graph state; other `fields` are left out if empty."""
    # `prompt` stays: None records that the call had none.
    extra = {name: value for name, value in fields.items() if name == "prompt" or value not in (None, False, [])}
    entry = HandleEntry(
        handle=handle.plain(),
        author=author,
        superstep=superstep,
        branch=branch,
        call=call,
        confidential=confidential,
        message_id=str(message.id),
        digest=digest_of(message),
    )
    return cast(HandleEntry, {**entry, **extra, **({"task_path": [*task_path]} if any(task_path) else {})})


def entries_of(
    encoded: Sequence[tuple[BaseMessage, str, bool, MessageHandle]],
    before: Mapping[str, HandleEntry],
    superstep: int,
    callers: Mapping[str, BaseMessage],
    task_path: Sequence[int] = (),
) -> list[HandleEntry]:
    """Return the entries of newly encoded messages.

    Args:
        encoded: Messages, each with its author, whether it is confidential, and its handle.
        before: Their earlier entries, by message id.
        superstep: Superstep of the first of them.
        callers: For tool results: the messages that called the tool, by the results' ids.
        task_path: Numbers of the `Send` branches around the node, outermost first.
    """
    entries: list[HandleEntry] = []
    for index, (message, author, private, handle) in enumerate(encoded):
        # Ids are random: without the task path, the order of branches would differ from run to run.
        entry = entry_of(handle, author, superstep, message, branch=index, task_path=task_path, confidential=private)
        persona, earlier = persona_of(message), before.get(str(message.id))
        claimed = unproven_of(message)
        if persona is not None and claimed is None:
            # Its author's entry, where it reaches this state, takes precedence.
            entry["borrowed"] = True
        if persona is not None and author != START_SOURCE:
            entry |= {"persona": persona, **({"thoughts": None} if thoughts_of(message) else {})}
        if (caller := callers.get(str(message.id))) is not None:
            entry["tool_node"] = writer_of(message)
            entry |= {} if (owner := persona_of(caller)) is None else {"persona": owner}
        if is_edited(message):
            entry["edited"] = True
        if claimed is not None:
            entry["unverified_author"] = dict(claimed)
        if earlier is not None and earlier["author"] == author:
            same = earlier.get("digest") == entry["digest"]
            entry = with_handle(earlier, handle) if same else with_edited_text(earlier, handle, entry["digest"])
            entry.pop("answered", None)
            if not same and author != START_SOURCE:
                entry["edited"] = True
                if "thoughts" in entry:
                    entry["thoughts"] = None
        elif entries and author != entries[-1]["author"] and not are_siblings(encoded[index - 1][0], message):
            superstep = entry["superstep"] = superstep + 1  # keeps the order of different authors' messages
        entries.append(entry)
    return entries


def is_input(entry: HandleEntry) -> bool:
    return entry["author"] == START_SOURCE


def is_encoded(message: BaseMessage, entries: Mapping[str, HandleEntry]) -> bool:
    """Return whether the message has an entry with its present text."""
    entry = entries.get(str(message.id))
    return entry is not None and entry.get("digest") in (None, digest_of(message))


def if_alive(engine: Engine, handle: MessageHandle | None) -> MessageHandle | None:
    """Return a handle if the engine still has it, or it is another model's; else None."""
    if handle is None:
        return None
    try:
        engine.usage(handle)
    except HandleError as error:
        return handle if isinstance(error, ForeignHandleError) else None
    return handle


def lost_ids(engine: Engine, entries: Mapping[str, HandleEntry]) -> set[str]:
    """Return the ids of messages that the engine's model encoded, and that the engine no longer knows."""
    model = engine.model.adapter.fingerprint
    handles = {name: handle for name, entry in entries.items() if (handle := handle_for(entry, model)) is not None}
    located = zip(handles.items(), engine.kv.tiers(list(handles.values())), strict=True)
    return {name for (name, handle), tier in located if tier is None and is_forgotten(engine, handle)}


def is_forgotten(engine: Engine, handle: MessageHandle) -> bool:
    """Return whether an engine does not know a handle: its engine was closed, or it is another model's."""
    try:
        engine.usage(handle)
    except (UnknownHandleError, ForeignHandleError):
        return True
    except HandleError:
        return False  # released on purpose: reading it raises
    return False


def without_removed(entries: Sequence[HandleEntry], messages: Sequence[BaseMessage], state: Any) -> list[HandleEntry]:
    """Return the entries whose message was not removed; all, if a `Send` left the `messages` channel out.

    LangGraph shows input to a route from START under other ids than the channel assigns. Entries that branches made of
    it are matched by digest, where the order of messages allows that.
    """
    if isinstance(state, Mapping) and "messages" not in state:
        return list(entries)
    by_id = {entry["message_id"]: entry for entry in entries}
    present = {message.id for message in messages}
    unnamed: dict[str, deque[HandleEntry]] = {}
    for candidate in entries:
        if candidate["author"] == START_SOURCE and candidate["message_id"] not in present:
            unnamed.setdefault(candidate.get("digest", ""), deque()).append(candidate)
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


# Authors of tool results: a result belongs to the caller of the tool


def calls_of(messages: Sequence[BaseMessage]) -> dict[str, str]:
    """Return the ids of messages that called tools, by the ids of the results, whoever wrote either.

    Args:
        messages: Messages in order: call ids may repeat, and the latest caller counts.
    """
    callers: dict[str, str] = {}
    by_result: dict[str, str] = {}
    for message in messages:
        callers |= {call.id: str(message.id) for call in tool_calls_of(message) if call.id}
        if isinstance(message, ToolMessage) and message.tool_call_id in callers:
            by_result[str(message.id)] = callers[message.tool_call_id]
    return by_result


def callers_of(messages: Sequence[BaseMessage]) -> dict[str, BaseMessage]:
    """Return the messages that called tools, by the ids of the results, where nodes of the graph wrote both.

    A result that comes as input belongs to input, whatever call it names; so does the result of a call in input.

    Args:
        messages: Messages of the state whose author is verified.
    """
    written = [message for message in messages if writer_of(message) != START_SOURCE]
    # Reversed, so that the first message with a call id counts: later ones copied it.
    calls = {call.id: message for message in reversed(written) for call in reversed(tool_calls_of(message))}
    results = [message for message in written if isinstance(message, ToolMessage) and message.tool_call_id in calls]
    return {str(result.id): calls[result.tool_call_id] for result in results}
