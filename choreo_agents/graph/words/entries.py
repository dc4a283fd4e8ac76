"""Entries of graph state: made of what was encoded, compared with what stands there; and whose tools' results are."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

from langchain_core.messages import BaseMessage, ToolMessage

from choreo_agents.chat import calls_made, thoughts_of
from choreo_agents.engine import Engine
from choreo_agents.errors import ForeignHandleError, HandleError, UnknownHandleError
from choreo_agents.graph.signer import are_siblings, digest_of, is_edited, persona_of, unproven_of, writer_of
from choreo_agents.graph.state import HandleEntry, handle_for, put_in, reworded
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle


def entry_of(
    handle: MessageHandle,
    author: str,
    superstep: int,
    message: BaseMessage,
    *,
    branch: int,
    around: Sequence[int],
    confidential: bool,
    call: int = 0,
    **noted: Any,
) -> HandleEntry:
    """The entry of a message in graph state; `noted`: what else it has, as far as that says anything."""
    # What was asked nothing says so.
    more = {name: value for name, value in noted.items() if name == "prompt" or value not in (None, False, [])}
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
    return cast(HandleEntry, {**entry, **more, **({"task_path": [*around]} if any(around) else {})})


def entries_of(
    said: Sequence[tuple[BaseMessage, str, bool, MessageHandle]],
    before: Mapping[str, HandleEntry],
    superstep: int,
    callers: Mapping[str, BaseMessage],
    around: Sequence[int] = (),
) -> list[HandleEntry]:
    """Entries of messages that were encoded just now, each with who said it, whether confidentially, and its handle.

    Args:
        said: These.
        before: Entries that they had, by message.
        superstep: In which they count as said.
        callers: Of tools' results, the messages that called for them.
        around: The branches that they stand in.
    """
    made: list[HandleEntry] = []
    for index, (message, author, mark, handle) in enumerate(said):
        # Ids are drawn at random: without what is around it, each run would have what branches were told otherwise.
        entry = entry_of(handle, author, superstep, message, branch=index, around=around, confidential=mark)
        persona, known = persona_of(message), before.get(str(message.id))
        claimed = unproven_of(message)
        if persona is not None and claimed is None:
            # It has an entry of its own where it was said: this one is for where there is none.
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
        if known is not None and known["author"] == author:
            is_new = known.get("digest") == entry["digest"] or author == START_SOURCE
            same = known.get("digest") == entry["digest"]
            entry = put_in(known, handle) if same else reworded(known, handle, entry["digest"])
            entry.pop("answered", None)
            if not is_new:
                entry["edited"] = True
                if "thoughts" in entry:
                    entry["thoughts"] = None
        elif made and author != made[-1]["author"] and not are_siblings(said[index - 1][0], message):
            superstep = entry["superstep"] = superstep + 1  # what others said in between stays in between
        made.append(entry)
    return made


def is_input(entry: HandleEntry) -> bool:
    return entry["author"] == START_SOURCE


def is_encoded(message: BaseMessage, entries: Mapping[str, HandleEntry]) -> bool:
    """Whether an entry stands for the message as it now reads."""
    entry = entries.get(str(message.id))
    return entry is not None and entry.get("digest") in (None, digest_of(message))


def live_handle(engine: Engine, handle: MessageHandle | None) -> MessageHandle | None:
    """A handle, if it is still good, or another model's."""
    if handle is None:
        return None
    try:
        engine.usage(handle)
    except ForeignHandleError:
        return handle
    except HandleError:
        return None
    return handle


def forgotten_among(engine: Engine, entries: Mapping[str, HandleEntry]) -> set[str]:
    """The messages, by entries by id, of whose encodings an engine knows nothing any more that its model has made."""
    model = engine.model.adapter.fingerprint
    made = {name: handle for name, entry in entries.items() if (handle := handle_for(entry, model)) is not None}
    there = zip(made.items(), engine.kv.tiers(list(made.values())), strict=True)
    return {name for (name, handle), tier in there if tier is None and is_forgotten(engine, handle)}


def is_forgotten(engine: Engine, handle: MessageHandle) -> bool:
    """Whether a handle is nothing to an engine: it outlived the one that made it, or is another model's."""
    try:
        engine.usage(handle)
    except (UnknownHandleError, ForeignHandleError):
        return True
    except HandleError:
        return False  # released on purpose: who reads it is told so
    return False


def without_removed(entries: Sequence[HandleEntry], messages: Sequence[BaseMessage], state: Any) -> list[HandleEntry]:
    """Return the entries whose message was not removed since; all, if a `Send` has left the channel out.

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


# Whose a tool's result is: that of who has called it


def calls_of(messages: Sequence[BaseMessage]) -> dict[str, str]:
    """Return the ids of messages that made calls, by those of the results, whoever wrote either.

    Args:
        messages: In the order in which they were said: ids of calls may come again.
    """
    made: dict[str, str] = {}
    found: dict[str, str] = {}
    for message in messages:
        made |= {call.id: str(message.id) for call in calls_made(message) if call.id}
        if isinstance(message, ToolMessage) and message.tool_call_id in made:
            found[str(message.id)] = made[message.tool_call_id]
    return found


def callers_of(messages: Sequence[BaseMessage]) -> dict[str, BaseMessage]:
    """Return the messages that called tools, by the ids of the results that nodes of the graph have written.

    A result that comes as input is input's, whatever call it names; so is what answers a call that came as input.

    Args:
        messages: Of the state, as far as it is proven who said them.
    """
    said = [message for message in messages if writer_of(message) != START_SOURCE]
    # Whoever names a call later has it from who made it.
    calls = {call.id: message for message in reversed(said) for call in reversed(calls_made(message))}
    results = [each for each in said if isinstance(each, ToolMessage) and each.tool_call_id in calls]
    return {str(each.id): calls[each.tool_call_id] for each in results}
