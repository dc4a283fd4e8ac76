"""Notes of who said what, and who signs them."""

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

from choreo_agents.chat import calls_made, thoughts_of
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import ProvenanceWarning
from choreo_agents.graph.langgraph_internals import SENDS, overwritten
from choreo_agents.graph.state import HandleEntry, handles_of, model_of
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle

Said = TypeVar("Said", bound=BaseMessage)
NOTE = "choreo"
"""In `response_metadata`: the note of whoever has said a message."""
MARK = "choreo_"
"""In `additional_kwargs`, and in what a `Send` hands over, names that start so are ours."""
UNPROVEN = "unverified_author"
"""In a note: who a message says has said it, where no signature proves it."""
_encode = json.JSONEncoder(sort_keys=True, default=str).encode
_NOT_SIGNED = dict.fromkeys(("handles_by_model", "signature", "select", "behind", "borrowed"))
"""What models add to an entry side by side, and what it says to one reader."""
_warned: WeakSet[Seals] = WeakSet()
"""Who was told already."""
Change = Callable[[Any], Any]
"""Makes of what is written to a channel what is to be written."""


# Notes: what a message says of who said it


def note_of(message: BaseMessage) -> Mapping[str, Any]:
    """Return what a message says of who said it; empty, as input's is, if it says nothing."""
    note = message.response_metadata.get(NOTE)
    if isinstance(note, dict) and isinstance(note.get("author", ""), str):
        return note
    source = message.additional_kwargs.get("choreo_source")  # so a function may name the agent that it speaks for
    return {} if source is None else {"author": str(source)}


def stripped(message: Said, note: Mapping[str, Any] | None = None) -> Said:
    """Return a message, with an id, that says nothing of who said it but what this note does."""
    metadata = {k: v for k, v in message.response_metadata.items() if k != NOTE} | ({NOTE: note} if note else {})
    more = {name: value for name, value in message.additional_kwargs.items() if not name.startswith(MARK)}
    named = message.id or str(uuid.uuid4())
    return message.model_copy(update={"response_metadata": metadata, "additional_kwargs": more, "id": named})


def claimed_in(by: Mapping[str, Any]) -> dict[str, Any]:
    """Return whose a message is by a note, or an entry, that is not proven."""
    return {"author": str(by.get("author")), "persona": by.get("persona"), "confidential": bool(by.get("confidential"))}


def opening_of(message: BaseMessage) -> Mapping[str, Any]:
    """Return how a message's turn starts, as its speaker noted, which must be proven: with a `speaker`'s name, or a
    `header`."""
    return {name: value for name, value in note_of(message).items() if name in ("speaker", "header")}


def writer_of(message: BaseMessage) -> str:
    """Return the node that wrote a message, behind its subgraphs; of input, LangGraph's START."""
    return str(note_of(message).get("author", START_SOURCE))


def are_siblings(one: BaseMessage, other: BaseMessage) -> bool:
    """Tell whether plain nodes of one superstep wrote both: neither has seen the other."""
    return bool(note_of(one).get("step")) and note_of(one)["step"] == note_of(other).get("step")


def persona_of(message: BaseMessage) -> str | None:
    """Return whose node said a message, if an agent did."""
    return note_of(message).get("persona")


def unproven_of(message: BaseMessage) -> Mapping[str, Any] | None:
    """Return who a message says has said it, where no signature proves it."""
    found = note_of(message).get(UNPROVEN)
    return found if isinstance(found, Mapping) else None


def handle_of(message: BaseMessage) -> MessageHandle | None:
    """Return what an agent's message was when it was said."""
    note = note_of(message)
    return MessageHandle(id=note["handle"], model=note["model"], length=note["length"]) if "handle" in note else None


def is_confidential(message: BaseMessage) -> bool:
    """Tell whether the agent that said a message keeps its messages to itself."""
    return bool((unproven_of(message) or note_of(message)).get("confidential"))


def is_edited(message: BaseMessage) -> bool:
    """Tell whether a message's words are no longer those of its note."""
    return "author" in note_of(message) and note_of(message).get("digest") != digest_of(message)


def digest_of(message: BaseMessage) -> str:
    """Return a digest of a message's words, its calls and the thoughts beside them: it changes when they do."""
    said: list[Any] = [_kind(message), message.name, str(message.text)]
    said += [message.role] if isinstance(message, ChatMessage) else []
    if isinstance(message, AIMessage):
        said += [[call.name, dict(call.arguments), call.id] for call in calls_made(message)]
        said += [[call["name"], call["args"], call["id"]] for call in message.invalid_tool_calls]
    said += [message.tool_call_id] if isinstance(message, ToolMessage) else []
    words, thoughts = _digest(said), thoughts_of(message)
    return f"{words}.{_digest(thoughts)}" if thoughts else words


def repeats(message: BaseMessage, digest: str) -> bool:
    """Tell whether a message has the words that a digest was made of, with the thoughts that there were or without."""
    return digest_of(message) in (digest, digest.partition(".")[0])


def _kind(message: BaseMessage) -> str:
    """Return a message's type; of one that was put together of streamed chunks, as LangGraph's state will have it."""
    return message.type.removesuffix("MessageChunk").lower()


def _digest(said: Any) -> str:
    return hashlib.sha256(_encode(said).encode()).hexdigest()[:32]


# The signature


@dataclasses.dataclass(frozen=True)
class Signer:
    """Signs and checks what is said in one run, in all of its nodes and the graphs in them."""

    seals: Seals
    place: list[str | None]
    """The outermost graph, by name, and the thread."""
    graph: tuple[str, ...] | None = ()
    """The nodes around the graph whose nodes sign; None: nobody has filtered what comes into it."""

    def signed(self, entry: HandleEntry) -> HandleEntry:
        """Return an entry with its signature, in place of what it had."""
        entry = HandleEntry(**{**entry, "thread": self.place})
        # Models that encode the same words side by side make an entry each, and a reducer, which has no key, merges
        # them: each handle is signed for the words by itself as well.
        made = {each.id: self.seals.seal("handle", _encoded(entry, each.plain())) for each in handles_of(entry)}
        made["entry"] = self.seals.seal("entry", {**entry, **_NOT_SIGNED})
        return HandleEntry(**{**entry, "signature": made})

    def proven(self, entry: Any, *, anywhere: bool = False) -> HandleEntry | None:
        """Return an entry if it is as it was signed here, or in any thread of the tenant's, with those of other
        models' handles that were; else None."""
        codes = entry.get("signature") if isinstance(entry, dict) else None
        code = codes.get("entry") if isinstance(codes, dict) else None
        if code is None or not (anywhere or entry.get("thread") == self.place):
            return None
        if not self.seals.holds(code, "entry", {**entry, **_NOT_SIGNED}):
            return None
        found = also.items() if isinstance(also := entry.get("handles_by_model"), Mapping) else ()
        kept = {model: plain for model, plain in found if self._is_encoding(entry, model, plain)}
        return cast(HandleEntry, {**entry, "handles_by_model": kept} if "handles_by_model" in entry else entry)

    def _is_encoding(self, entry: Mapping[str, Any], model: str, plain: Any) -> bool:
        """Tell whether a handle is signed as what another model than its speaker's has made of an entry's words."""
        code = entry["signature"].get(str(plain.get("id"))) if isinstance(plain, Mapping) else None
        is_signed = self.seals.holds(code, "handle", _encoded(entry, plain))
        return is_signed and model == model_of(plain) != model_of(entry["handle"])

    def noted(self, message: Said, note: Mapping[str, Any]) -> Said:
        """Return a message with a signed note of who has said it; in these words, if it does not say in which."""
        note = {"digest": digest_of(message), **note, "thread": self.place, "signature": None}
        code = self.seals.seal("note", [message.id, _kind(message), note])
        return stripped(message, {**note, "signature": code})

    def proves(self, message: BaseMessage, *, anywhere: bool = False) -> bool:
        """Tell whether a message's note was signed here, for this message; its words may have been edited since."""
        # A person's words do not become an instruction, nor an agent's a person's.
        note = note_of(message)
        said = [message.id, _kind(message), {**note, "signature": None}]
        return (anywhere or note.get("thread") == self.place) and self.seals.holds(note.get("signature"), "note", said)

    def moved(self, update: Any, standing: dict[str, BaseMessage]) -> Any:
        """Return an operator's update of a state with what was said in other threads signed for this one.

        Other words in the place of a message are an edit of it: they bear its note.

        Args:
            update: In any form.
            standing: The messages that it comes to, by id; its own are put in.
        """

        def entry(given: Any) -> Any:
            return self.signed(known) if (known := self.proven(given, anywhere=True)) is not None else given

        def message(given: BaseMessage) -> BaseMessage:
            there = given if self.proves(given, anywhere=True) else standing.get(str(given.id))
            if there is not None and self.proves(there, anywhere=True) and given.type != "remove":
                given = self.noted(given, note_of(there))
            standing[str(given.id)] = given
            return given

        def each_of(value: Any, listed: Callable[[Any], Sequence[Any]], move: Change) -> Any:
            is_overwrite, given = overwritten(value)
            moved = [move(one) for one in listed(given or [])]
            return Overwrite(moved) if is_overwrite else moved

        messages = partial(each_of, listed=listed_messages, move=message)
        return rewritten(update, {"handles": partial(each_of, listed=list, move=entry), "messages": messages})

    def warn(self) -> None:
        """Say, once for each tenant of an engine, that somebody's words are not proven to be theirs."""
        if self.seals not in _warned:
            _warned.add(self.seals)
            warnings.warn(
                "a message or handle that no signature proves to be of this thread is input: it was said in another or "
                "under another salt, or somebody has made it up (engines of all processes need one salt=...)",
                ProvenanceWarning,
                stacklevel=3,
            )


def _encoded(entry: Mapping[str, Any], plain: Any) -> list[Any]:
    # Not the superstep: models that encode input side by side may count otherwise.
    said = ("thread", "message_id", "author", "persona", "confidential", "digest", "answered")
    return [*map(entry.get, said), plain]


# Updates of a state


def rewritten(update: Any, changes: Mapping[str, Change]) -> Any:
    """An update in the form that it has, with other values for some channels.

    Args:
        update: Of the state.
        changes: By channel; channels that it does not write stay out. What a `Command` sends is written to `SENDS`.
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


def listed_messages(written: Any) -> Sequence[BaseMessage]:
    """What was written to a messages channel, as messages.

    Raises:
        ValueError, NotImplementedError: It is no message.
    """
    return convert_to_messages(written if isinstance(written, list) else [written])
