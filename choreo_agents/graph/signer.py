"""Notes of messages' authors, and the signer of notes and entries."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage, convert_to_messages
from langgraph.types import Command, Overwrite, Send

from choreo_agents.chat import thoughts_of, tool_calls_of
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import ProvenanceWarning
from choreo_agents.graph.langgraph_internals import SENDS, overwritten
from choreo_agents.graph.state import HandleEntry, handles_of, model_of
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle

Said = TypeVar("Said", bound=BaseMessage)
NOTE = "choreo"
"""Key of a message's note in `response_metadata`."""
MARK = "choreo_"
"""Prefix of our keys in `additional_kwargs`, and in the payload of a `Send`."""
UNPROVEN = "unverified_author"
"""Key in a note: the claimed author that no signature proves."""
_encode = json.JSONEncoder(sort_keys=True, default=str).encode
_NOT_SIGNED = dict.fromkeys(("handles_by_model", "signature", "select", "behind", "borrowed"))
"""Fields that several models add concurrently, or that concern one reader."""
_warned: WeakSet[Seals] = WeakSet()
"""Tenants that were warned."""
Change = Callable[[Any], Any]
"""Function from a value that is written to a channel to the value to write."""


# Notes of messages' authors


def note_of(message: BaseMessage) -> Mapping[str, Any]:
    """Return the note of a message's author, verified or not; empty for input."""
    note = message.response_metadata.get(NOTE)
    if isinstance(note, dict) and isinstance(note.get("author", ""), str):
        return note
    source = message.additional_kwargs.get("choreo_source")  # set by a function that speaks for an agent
    return {} if source is None else {"author": str(source)}


def stripped(message: Said, note: Mapping[str, Any] | None = None) -> Said:
    """Return a message, with an id, whose only information on its author is this note."""
    metadata = {k: v for k, v in message.response_metadata.items() if k != NOTE} | ({NOTE: note} if note else {})
    more = {name: value for name, value in message.additional_kwargs.items() if not name.startswith(MARK)}
    named = message.id or str(uuid.uuid4())
    return message.model_copy(update={"response_metadata": metadata, "additional_kwargs": more, "id": named})


def claimed_in(by: Mapping[str, Any]) -> dict[str, Any]:
    """Return author, persona and confidentiality from an unverified note or entry."""
    return {"author": str(by.get("author")), "persona": by.get("persona"), "confidential": bool(by.get("confidential"))}


def opening_of(message: BaseMessage) -> Mapping[str, Any]:
    """Return how a message's turn starts, from its verified note: with a `speaker`'s name, or a `header`."""
    return {name: value for name, value in note_of(message).items() if name in ("speaker", "header")}


def writer_of(message: BaseMessage) -> str:
    """Return the node that wrote a message, as `team|node` in a subgraph; LangGraph's START for input."""
    return str(note_of(message).get("author", START_SOURCE))


def are_siblings(first: BaseMessage, second: BaseMessage) -> bool:
    """Return whether plain nodes of one superstep wrote both messages: neither could see the other."""
    return bool(note_of(first).get("step")) and note_of(first)["step"] == note_of(second).get("step")


def persona_of(message: BaseMessage) -> str | None:
    """Return the persona of the agent that wrote a message; None: no agent did."""
    return note_of(message).get("persona")


def unproven_of(message: BaseMessage) -> Mapping[str, Any] | None:
    """Return the claimed author of a message without a valid signature."""
    claim = note_of(message).get(UNPROVEN)
    return claim if isinstance(claim, Mapping) else None


def handle_of(message: BaseMessage) -> MessageHandle | None:
    """Return the handle of an agent's message as it was decoded."""
    note = note_of(message)
    return MessageHandle(id=note["handle"], model=note["model"], length=note["length"]) if "handle" in note else None


def is_confidential(message: BaseMessage) -> bool:
    """Return whether a message is confidential to its agent."""
    return bool((unproven_of(message) or note_of(message)).get("confidential"))


def is_edited(message: BaseMessage) -> bool:
    """Return whether a message's text differs from that of its note."""
    return "author" in note_of(message) and note_of(message).get("digest") != digest_of(message)


def digest_of(message: BaseMessage) -> str:
    """Return a digest of a message's text and calls, followed by `.` and one of its thoughts, if it has any."""
    parts: list[Any] = [_kind(message), message.name, str(message.text)]
    parts += [message.role] if isinstance(message, ChatMessage) else []
    if isinstance(message, AIMessage):
        parts += [[call.name, dict(call.arguments), call.id] for call in tool_calls_of(message)]
        parts += [[call["name"], call["args"], call["id"]] for call in message.invalid_tool_calls]
    parts += [message.tool_call_id] if isinstance(message, ToolMessage) else []
    words, thoughts = _digest(parts), thoughts_of(message)
    return f"{words}.{_digest(thoughts)}" if thoughts else words


def repeats(message: BaseMessage, digest: str) -> bool:
    """Return whether a message has the text of a digest, with or without its thoughts."""
    return digest_of(message) in (digest, digest.partition(".")[0])


def _kind(message: BaseMessage) -> str:
    """Return a message's type; for a message chunk that of the message, which LangGraph's state will hold."""
    return message.type.removesuffix("MessageChunk").lower()


def _digest(value: Any) -> str:
    return hashlib.sha256(_encode(value).encode()).hexdigest()[:32]


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


# The signature


@dataclasses.dataclass(frozen=True)
class Signer:
    """Signer and verifier of the messages and entries of one run, subgraphs included."""

    seals: Seals
    place: list[str | None]
    """Name of the outermost graph, and the thread."""
    graph: tuple[str, ...] | None = ()
    """Nodes around the graph whose nodes sign; None: its input was not filtered."""

    def sign_entry(self, entry: HandleEntry) -> HandleEntry:
        """Return an entry with a new signature."""
        entry = HandleEntry(**{**entry, "thread": self.place})
        # Models that encode a message concurrently make an entry each, and the reducer, which has no key, merges them:
        # so each handle has a signature of its own.
        codes = {handle.id: self.seals.seal("handle", _payload(entry, handle.plain())) for handle in handles_of(entry)}
        codes["entry"] = self.seals.seal("entry", {**entry, **_NOT_SIGNED})
        return HandleEntry(**{**entry, "signature": codes})

    def proven(self, entry: Any, *, anywhere: bool = False) -> HandleEntry | None:
        """Return an entry whose signature is valid, without other models' handles that are not signed; else None.

        The entry must be of this thread, or with `anywhere` of any thread of the tenant.
        """
        codes = entry.get("signature") if isinstance(entry, dict) else None
        code = codes.get("entry") if isinstance(codes, dict) else None
        if code is None or not (anywhere or entry.get("thread") == self.place):
            return None
        if not self.seals.holds(code, "entry", {**entry, **_NOT_SIGNED}):
            return None
        pairs = by_model.items() if isinstance(by_model := entry.get("handles_by_model"), Mapping) else ()
        verified = {model: plain for model, plain in pairs if self._is_encoding(entry, model, plain)}
        return cast(HandleEntry, {**entry, "handles_by_model": verified} if "handles_by_model" in entry else entry)

    def _is_encoding(self, entry: Mapping[str, Any], model: str, plain: Any) -> bool:
        """Return whether a handle is signed as another model's encoding of an entry's message."""
        code = entry["signature"].get(str(plain.get("id"))) if isinstance(plain, Mapping) else None
        is_signed = self.seals.holds(code, "handle", _payload(entry, plain))
        return is_signed and model == model_of(plain) != model_of(entry["handle"])

    def sign_message(self, message: Said, note: Mapping[str, Any]) -> Said:
        """Return a message with a signed note of its author; the note's digest defaults to that of the message."""
        note = {"digest": digest_of(message), **note, "thread": self.place, "signature": None}
        code = self.seals.seal("note", [message.id, _kind(message), note])
        return stripped(message, {**note, "signature": code})

    def proves(self, message: BaseMessage, *, anywhere: bool = False) -> bool:
        """Return whether a message's note was signed for this message and thread; its text may have been edited."""
        # The type is signed, too: a human message must not become a system prompt, nor an agent's a human's.
        note = note_of(message)
        body = [message.id, _kind(message), {**note, "signature": None}]
        return (anywhere or note.get("thread") == self.place) and self.seals.holds(note.get("signature"), "note", body)

    def moved(self, update: Any, standing: dict[str, BaseMessage]) -> Any:
        """Return an operator's state update, with messages and entries of other threads signed for this one.

        A message with the id of a present one is an edit of it, and bears its note.

        Args:
            update: Update in any form that LangGraph takes.
            standing: Messages of the state by id; those of the update are added.
        """

        def move_entry(value: Any) -> Any:
            return self.sign_entry(proven) if (proven := self.proven(value, anywhere=True)) is not None else value

        def move_message(message: BaseMessage) -> BaseMessage:
            source = message if self.proves(message, anywhere=True) else standing.get(str(message.id))
            if source is not None and self.proves(source, anywhere=True) and message.type != "remove":
                message = self.sign_message(message, note_of(source))
            standing[str(message.id)] = message
            return message

        def move_all(value: Any, listed: Callable[[Any], Sequence[Any]], move: Change) -> Any:
            is_overwrite, written = overwritten(value)
            moved = [move(item) for item in listed(written or [])]
            return Overwrite(moved) if is_overwrite else moved

        messages = partial(move_all, listed=to_messages, move=move_message)
        return rewritten(update, {"handles": partial(move_all, listed=list, move=move_entry), "messages": messages})

    def warn(self) -> None:
        """Warn, once per tenant of an engine, of a message or entry without a valid signature."""
        if self.seals not in _warned:
            _warned.add(self.seals)
            warnings.warn(
                "a message or handle without a valid signature of this thread is treated as input: it is from another "
                "thread or salt, or was made up (engines of all processes need the same salt=...)",
                ProvenanceWarning,
                stacklevel=3,
            )


def _payload(entry: Mapping[str, Any], plain: Any) -> list[Any]:
    # Not the superstep: models that encode input concurrently may assign different ones.
    fields = ("thread", "message_id", "author", "persona", "confidential", "digest", "answered")
    return [*map(entry.get, fields), plain]


# Updates of a state


def rewritten(update: Any, changes: Mapping[str, Change]) -> Any:
    """Return an update of the same form, with changed values for some channels.

    Args:
        update: Update of the state, in any form that LangGraph takes.
        changes: Functions by channel; channels that it does not write stay out. `SENDS` is for a `Command`'s `goto`.
    """
    forward = changes.get(SENDS, lambda sends: sends)
    if isinstance(update, Send) and SENDS in changes:
        return forward(update)[0]
    if isinstance(update, Command):
        return dataclasses.replace(update, update=rewritten(update.update, changes), goto=forward(update.goto))
    if isinstance(update, Mapping):
        return {**update, **{name: change(update[name]) for name, change in changes.items() if name in update}}
    if isinstance(update, tuple) and len(update) == 2 and isinstance(update[0], str):
        return update[0], changes.get(update[0], lambda value: value)(update[1])
    if isinstance(update, list | tuple):
        parts = [rewritten(part, changes) for part in update]
        return parts if isinstance(update, list) else tuple(parts)
    if written := {name: change(getattr(update, name)) for name, change in changes.items() if hasattr(update, name)}:
        update = copy(update)
        for name, value in written.items():
            object.__setattr__(update, name, value)  # frozen or not
    return update


def to_messages(written: Any) -> Sequence[BaseMessage]:
    """Return a write to a messages channel as messages.

    Raises:
        ValueError, NotImplementedError: It holds something that is no message.
    """
    return convert_to_messages(written if isinstance(written, list) else [written])
