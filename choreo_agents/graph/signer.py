"""Verified authorship of messages, by signatures.

Messages bear notes of their authors, and entries in `handles` name them, but clients could forge both. Only those
signed by the thread's `Signer` count. They are checked in three places: where input comes (`InputFilter`), where plain
nodes write (`sign`), and where an agent reads (`ProvenState`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    RemoveMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.runnables import RunnableConfig
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Overwrite, Send, StateSnapshot

from choreo_agents.chat import thoughts_of, tool_calls_of
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import InvalidRequestError, ProvenanceWarning, VisibilityError
from choreo_agents.graph.langgraph_internals import (
    SENDS,
    channel_values,
    is_nested,
    overwritten,
    run_step_of,
    saver_of,
    thread_of,
)
from choreo_agents.graph.nesting import author_of, path_of
from choreo_agents.graph.run_context import RunContext
from choreo_agents.graph.state import HandleEntry, channel_in, handles_of, model_of
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
_NOTED = ("author", "persona", "confidential", "handle", "model", "length", "speaker", "header")
"""Fields of an agent's note on its message."""
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


# The run's signer


def signer_for(called: RunnableConfig, seals: Seals | None, name: str) -> Signer | None:
    """Return the signer of a graph's nodes: that of the outer graph in the same thread, if any; None: no signer.

    Args:
        called: Config that the graph runs with.
        seals: Seals of the graph's own engine; None: it has none, and signs as the outer graph.
        name: Name of the graph.
    """
    outer, place = RunContext.of(called).signer, [name, thread_of(called)]
    around = path_of(called) if is_nested(called) else ()
    if outer is None:
        return None if seals is None else signing(called, seals) if is_nested(called) else Signer(seals, place)
    # Without a salt, each engine has a random key: a thread's messages must be signed under one key.
    own = outer.seals if seals is None or not seals.salted else seals
    graph = around if not around or outer.graph == around[:-1] else None
    return Signer(own, outer.place if outer.place[1] == place[1] else place, graph)


def signing(config: RunnableConfig, seals: Seals) -> Signer:
    """Return the signer of a node's run; in a stock LangGraph graph, one with these seals and no graph name."""
    place = ["" if saver_of(config) is None else None, thread_of(config)]
    return RunContext.of(config).signer or Signer(seals, place, graph=None)


# Input


class InputFilter:
    """Filter of one run's input.

    With a checkpointer, only the saved state tells authors, never the input; without one, signed and unedited messages
    do. All other messages count as input. They can neither replace nor remove messages of others: one with the id of
    another's message gets a new id.

    Args:
        signer: Signer of the run; None: the graph has no agents, and nothing is filtered.
        called: Config of the run.
        saved: Config of the thread's saved state; None: no state is saved.
    """

    def __init__(self, signer: Signer | None, called: RunnableConfig, saved: RunnableConfig | None) -> None:
        # Input of a subgraph has passed the outer graph's filter.
        self._signer = None if is_nested(called) else signer
        self._saved = saved
        self._standing: dict[str, BaseMessage] = {}
        self._entries: dict[str, HandleEntry] = {}

    def snapshot_config(self, graph_input: Any) -> RunnableConfig | None:
        """Return the config of the saved state to compare input with; None: there is none, or no need."""
        named: list[bool] = []

        def messages(value: Any) -> Any:
            is_overwrite, written = overwritten(value)
            named.append(is_overwrite or any(message.id is not None for message in to_messages(written or [])))
            return value

        _rewrite_all(graph_input if self._signer else None, {"messages": messages}, lambda payload: named.append(True))
        return self._saved if any(named) else None

    def filter(self, graph_input: Any, snapshot: StateSnapshot | None = None) -> Any:
        """Return filtered input.

        Args:
            graph_input: Input of the graph's caller.
            snapshot: The saved state, if `snapshot_config` asked for it.
        """
        if graph_input is None or self._signer is None:
            return graph_input
        if self._saved is None:
            changes = {"handles": self._handles}  # entries first: messages are compared with them
            _rewrite_all(graph_input, changes, partial(rewritten, changes=changes))
        elif snapshot is not None:
            self._standing = by_id(snapshot.values.get("messages"))
            self._entries = {entry["message_id"]: entry for entry in snapshot.values.get("handles") or []}
        return _rewrite_all(graph_input, {"messages": self._messages, "handles": self._handles}, self._sent)

    def _messages(self, value: Any, *, is_sent: bool = False) -> Any:
        is_overwrite, written = overwritten(value)
        messages = to_messages(written or [])
        last = max((index for index, message in enumerate(messages) if message.id == REMOVE_ALL_MESSAGES), default=None)
        if is_sent:
            messages = [message for message in messages if not isinstance(message, RemoveMessage)]
        elif is_overwrite or last is not None:
            own = [RemoveMessage(id=name) for name in self._standing if not self._is_others(name)]
            messages = [*own, *messages[0 if last is None else last + 1 :]]
        return [passed for message in messages if (passed := self._message(message, is_sent=is_sent)) is not None]

    def _message(self, message: BaseMessage, *, is_sent: bool) -> BaseMessage | None:
        """Return a message as it may enter the state; None: it changes nothing."""
        assert self._signer is not None
        name = str(message.id)
        if self._saved is None and self._signer.proves(message) and not is_edited(message):
            return self._standing.setdefault(name, message)
        if not self._is_others(name):
            if "author" in note_of(message):
                self._signer.warn()
            return stripped(message)
        standing, entry = self._standing.get(name), self._entries.get(name)
        if standing is not None and repeats(message, digest_of(standing)):
            return standing if is_sent else None  # many clients send the history back, without notes
        if self._saved is None and entry is not None and repeats(message, entry["digest"]):
            return stripped(message)
        self._signer.warn()
        return None if isinstance(message, RemoveMessage) else stripped(message.model_copy(update={"id": None}))

    def _is_others(self, name: str) -> bool:
        """Return whether the message of that id, present or removed, was not input."""
        author = self._entries[name]["author"] if name in self._entries else START_SOURCE
        return author != START_SOURCE or (name in self._standing and "author" in note_of(self._standing[name]))

    def _handles(self, value: Any, *, is_sent: bool = False) -> list[HandleEntry]:
        assert self._signer is not None
        _, written = overwritten(value)
        entries: list[Any] = written if isinstance(written, list) else []
        signed = [entry for item in entries if (entry := self._signer.proven(item)) is not None]
        if len(signed) < len(entries):
            self._signer.warn()
        if self._saved is None:
            self._entries |= {entry["message_id"]: entry for entry in signed}
            return signed
        sent = [(entry, self._standing.get(entry["message_id"])) for entry in signed if is_sent]
        return [entry for entry, message in sent if message is not None and entry["digest"] == digest_of(message)]

    def _sent(self, payload: Any) -> Any:
        """Return the filtered payload of a `Send` in input."""
        if isinstance(payload, Mapping):
            # Keys with this prefix are internal to `send`: a client must not set them.
            payload = {name: value for name, value in payload.items() if not name.startswith(MARK)}
        changes = {"messages": partial(self._messages, is_sent=True), "handles": partial(self._handles, is_sent=True)}
        return rewritten(payload, changes)


def _rewrite_all(value: Any, changes: Mapping[str, Change], sent: Change) -> Any:
    """Return input in any form, with changed values for some channels and for the payloads of sends."""
    changes = {**changes, SENDS: partial(_change_sends, change=sent)}
    return rewritten(value, {**changes, START_SOURCE: partial(rewritten, changes=changes)})  # LangGraph's own channel


def _change_sends(sends: Any, change: Change) -> list[Any]:
    """Return sends and names of nodes, with the payloads of sends changed."""
    listed = sends if isinstance(sends, list | tuple) else [sends]
    changed = [copy(target) if isinstance(target, Send) else target for target in listed]
    for target in changed:
        if isinstance(target, Send):
            target.arg = change(target.arg)
    return changed


def forward_sends(
    sends: Any, config: RunnableConfig, added: Sequence[Any] = (), *, fresh: bool = False, on_new: Change | None = None
) -> list[Any]:
    """Return sends and names of nodes, where messages of the state keep the notes that they have there.

    Args:
        sends: Targets of a node or route, in any form that LangGraph takes.
        config: Config of the node, or of the one before the route.
        added: Messages that the node adds in the same step.
        fresh: Whether the state includes the node's writes already, as for routes.
        on_new: Changes messages that are not in the state with the same text; None: they stay as they are.
    """

    standing = cache(lambda: {**_standing(config, fresh=fresh), **by_id(added)})

    def noted(value: Any) -> Any:
        if value is None:
            return None
        with suppress(NotImplementedError, ValueError):  # a payload may hold values that are no messages
            [message] = convert_to_messages([value])
            if (known := with_note_of(message, standing().get(str(message.id)))) is not None:
                return known
        return value if on_new is None else on_new(value)

    def messages(written: Any) -> Any:
        return type(written)(map(noted, written)) if isinstance(written, list | tuple) else noted(written)

    return _change_sends(sends, partial(rewritten, changes={"messages": messages}))


def with_note_of(message: BaseMessage, standing: BaseMessage | None, *, edited: bool = False) -> BaseMessage | None:
    """Return a message with the note of the one with its id, if the text is the same or may be `edited`; else None."""
    if standing is None or not (edited or message is standing or repeats(message, digest_of(standing))):
        return None
    return stripped(message, note_of(standing))


def _standing(config: RunnableConfig, *, fresh: bool = False) -> dict[str, BaseMessage]:
    """Return the messages of a node's input state by id; `fresh`: with the node's own writes."""
    return by_id(channel_values(config, ("messages",), fresh=fresh).get("messages"))


def by_id(messages: Any) -> dict[str, BaseMessage]:
    """Return the messages of a channel by id."""
    return {str(message.id): message for message in messages or [] if isinstance(message, BaseMessage)}


def sign(
    output: Any, config: RunnableConfig, node: str | None, persona: str | None = None, *, confidential: bool = False
) -> Any:
    """Sign the messages that a plain node adds, with the node as author, in any form of output that LangGraph takes.

    Messages that it passes on keep their notes: those of the state, human and system messages with an id, those of
    agents inside the node, and unedited ones of others. An agent's message that it edits becomes the node's, unless
    the node belongs to that agent's persona.

    Args:
        output: Output of the node.
        config: Config of the node; `node` is its name.
        persona: Persona that the node is declared to belong to; None: its own.
        confidential: Whether messages that it adds are confidential.

    Raises:
        InvalidRequestError: It wrote something to `messages` that is no message.
    """
    signer, author = RunContext.of(config).signer, author_of(config, node)
    speaks_for = persona and "|".join([*author.split("|")[:-1], persona])

    def proves(message: BaseMessage) -> bool:
        return signer is not None and signer.proves(message)

    def is_its_own(message: BaseMessage) -> bool:
        """Return whether a message is the node's, of an agent inside it, or of its declared persona."""
        names = [str(note_of(message).get(name) or author) for name in ("author", "persona")]
        inside = all(name == author or name.startswith(f"{author}|") for name in names)
        return proves(message) and (inside or speaks_for in names)

    def signed(message: BaseMessage, standing: BaseMessage | None) -> BaseMessage:
        noted = with_note_of(message, standing, edited=standing is not None and is_its_own(standing))
        if noted is not None and not is_its_own(noted):
            return noted
        message = noted or message
        is_proven, claimed = proves(message), note_of(message)
        if is_proven and not is_edited(message):
            return message
        is_somebodys = is_proven or (standing is not None and "author" in note_of(standing))
        if message.id is not None and message.type in ("human", "system") and not is_somebodys:
            return stripped(message)
        note = {"author": author, "step": run_step_of(config), "confidential": confidential}
        if is_its_own(message):
            note = {name: value for name, value in claimed.items() if name in _NOTED}
        elif not is_proven and persona is not None:  # unverified: only the declared persona may be claimed
            note |= {name: speaks_for for name in ("author", "persona") if claimed.get(name) == speaks_for}
        named = message if message.id is not None else message.model_copy(update={"id": str(uuid.uuid4())})
        # A stock LangGraph graph has no signer: readers apply visibility by the unsigned author.
        return stripped(named, note) if signer is None else signer.sign_message(named, note)

    def put_on(added: Any) -> Any:
        is_overwrite, written = overwritten(added)
        try:
            messages = to_messages([] if written is None else written)
        except (NotImplementedError, ValueError) as error:
            # Unsigned it would count as input, and be visible to agents from whom the node is hidden.
            raise InvalidRequestError(f"node {author!r} wrote to `messages` what is not a message: {error}") from error
        standing = _standing(config)
        messages = [m if m.type == "remove" else signed(m, standing.get(str(m.id))) for m in messages]
        return Overwrite(messages) if is_overwrite else messages

    return rewritten(output, {"messages": put_on, SENDS: partial(forward_sends, config=config)})


def require_silent(output: Any, config: RunnableConfig, node: str) -> Any:
    """Return the output of a node with `writes=()`; it may send messages of the state on.

    Raises:
        VisibilityError: It writes a message, in any form of output that LangGraph takes.
    """

    def refuse(channel: str, _: Any) -> Any:
        raise VisibilityError(
            f"node {author_of(config, node)!r} was added with writes=(), but writes {channel!r}: remove one of the two"
        )

    changes = {channel: partial(refuse, channel) for channel in ("messages", "handles")}
    return rewritten(output, {**changes, SENDS: partial(forward_sends, config=config, on_new=changes["messages"])})


# Verified state of an agent


class ProvenState:
    """Messages and entries of a graph's state, as one agent may trust them.

    Args:
        state: State of the graph, as the agent gets it.
        config: Config of the agent.
        seals: Seals of its engine, for stock LangGraph graphs.
    """

    def __init__(self, state: Any, config: RunnableConfig, seals: Seals) -> None:
        messages, self.signer = with_ids(_channel(state, "messages")), signing(config, seals)
        # In a guarded graph, input was filtered and writes were signed: a text that differs from its note's digest is
        # an operator's edit, and keeps its author.
        is_guarded = self.signer.graph == path_of(config)[:-1]
        present = by_id(messages)
        proven = {name: message for name, message in present.items() if self.signer.proves(message)}
        writers = {name: writer_of(message) for name, message in proven.items() if is_guarded or not is_edited(message)}
        self.entries: list[HandleEntry] = []
        self._claims: dict[str, dict[str, Any]] = {}
        listed = _channel(state, "handles")
        named = {item.get("message_id") for item in listed if isinstance(item, dict)}
        # Entries of the outer graph count only for messages that came in here: a branch sees no more than it was sent.
        outer = RunContext.of(config).outer_entries
        inherited = (entry for entry in outer if entry["message_id"] in present.keys() - named)
        for item in [*listed, *inherited]:
            entry = self.signer.proven(item)
            is_input = isinstance(item, dict) and item.get("author") == START_SOURCE
            if entry is not None and (is_input or _is_of(entry, present, writers)):
                self.entries.append(entry)
            elif isinstance(item, dict) and not is_input:
                self._claims[str(item.get("message_id"))] = claimed_in(item)
                self.signer.warn()
        self.messages = [message if str(message.id) in writers else self._unproven(message) for message in messages]
        self.superstep = 1 + max((entry["superstep"] for entry in self.entries), default=-1)
        """Earliest superstep of new messages. Removed messages count, so that new ones do not take their positions."""

    def _unproven(self, message: BaseMessage) -> BaseMessage:
        """Return a message without its note; an unverified author is recorded separately."""
        note = note_of(message)
        claimed = claimed_in(note) if "author" in note else self._claims.get(str(message.id))
        if claimed is not None:
            self.signer.warn()
        return stripped(message, {UNPROVEN: claimed} if claimed else None) if note or claimed else message


def _is_of(entry: HandleEntry, messages: Mapping[str, BaseMessage], writers: Mapping[str, str]) -> bool:
    """Return whether an entry belongs to the message of its id: same text, or edited text of the same author."""
    name = entry["message_id"]
    return name not in messages or entry["author"] == writers.get(name) or entry["digest"] == digest_of(messages[name])


def with_ids(messages: Sequence[Any]) -> list[BaseMessage]:
    """Return messages of any form as `BaseMessage`s. Those without an id get one that is the same for every reader."""
    converted = convert_to_messages(messages)
    for index, message in enumerate(converted):
        if message.id is None:
            message.id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{index} {message.type} {message.text}"))
    return converted


def _channel(state: Any, name: str) -> Sequence[Any]:
    listed = channel_in(state, name)
    return listed if isinstance(listed, list | tuple) else [listed] if listed else []
