"""One conversation: what was said in it is sealed, and known again by its seals.

Two seals stand on each message and each entry. Identity: which conversation, in which graph, which message, whose.
Words: what it says, and the handle that stands for it; in an entry each handle has its own, since several models may
have one. Words without their seal were edited; without a true identity nobody knows who said them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from langchain_core.messages import BaseMessage
from pydantic import ValidationError

from choreo_agents.engine.messages.seals import Seals
from choreo_agents.graph.by_model import handles_of, model_of
from choreo_agents.graph.provenance.notes import (
    CONFIDENTIAL,
    NOTED,
    SEALS,
    SIGNED,
    SOURCE,
    STEP,
    Claim,
    claim_of,
    digest_of,
    said,
    stripped,
)
from choreo_agents.graph.state import HandleEntry
from choreo_agents.kv.handle import MessageHandle

Said = TypeVar("Said", bound=BaseMessage)

_OF_ONE_BRANCH = ("select", "behind", "borrowed", "seals")
"""What an entry says to one reader, or while it is merged: not sealed."""
_BY_MODEL = ("handle", "also")
"""Sealed one by one: what two models encode side by side is one entry's."""


class Conversation:
    """What was said under one id.

    Args:
        seals: The tenant's.
        name: The conversation's id.
        scope: The graph that speaks, by name.
    """

    def __init__(self, seals: Seals, name: str, scope: str) -> None:
        self._seals = seals
        self.name = name
        self.scope = scope

    def sealed(self, message: Said) -> Said:
        """An agent's message with seals on its notes, or a plain node's with seals beside its signature."""
        claim, digest = claim_of(message), digest_of(message)
        assert claim is not None and message.id is not None
        identity = self._identity(message, claim, self.scope)
        words = self._seals.seal("words", [identity, digest, claim.rest])
        marks = self._marks(identity, words) | {"digest": digest}
        if NOTED in message.response_metadata:
            metadata = {**message.response_metadata, NOTED: {**said(message), "seals": marks}}
            return message.model_copy(update={"response_metadata": metadata})
        return message.model_copy(update={"additional_kwargs": {**message.additional_kwargs, SEALS: marks}})

    def sealed_entry(self, entry: HandleEntry) -> HandleEntry:
        """An entry with seals, in place of those that it had."""
        identity = self._entry_identity(entry, self.scope)
        words = self._seals.seal("entry words", [identity, _plain(entry)])
        made = {each.id: self._seals.seal("entry handle", self._encoded(entry, each)) for each in handles_of(entry)}
        return HandleEntry(**{**entry, "seals": self._marks(identity, words) | {"handles": made}})

    def proves(self, message: BaseMessage, scope: str | None = None) -> bool:
        """Whether a message was said here by whom it says, in whatever words.

        Args:
            message: In any form, from anybody.
            scope: The graph that must have said it; None: any of the tenant's.
        """
        claim = claim_of(message)
        if claim is None or not self._is_here(claim.seals, scope):
            return False
        identity = self._identity_content(message, claim, claim.seals.get("scope"))
        return self._seals.holds(claim.seals.get("identity"), "identity", identity)

    def holds(self, entry: object, scope: str | None = None) -> bool:
        """Whether an entry is as it was made here; see `proves`."""
        seals = entry.get("seals") if isinstance(entry, Mapping) else None
        if not isinstance(entry, Mapping) or not isinstance(seals, Mapping) or not self._is_here(seals, scope):
            return False
        identity, whole = seals.get("identity"), (self.name, entry)
        if self._seals.remembers(identity, "entry", whole):
            return True
        holds = (
            self._seals.holds(identity, "entry identity", self._entry_content(entry, seals.get("scope")))
            and self._seals.holds(seals.get("words"), "entry words", [identity, _plain(entry)])
            and self._is_encoded(entry, entry.get("handle"))
        )
        if holds:
            self._seals.remember(str(identity), "entry", whole)
        return holds

    def as_encoded(self, entry: HandleEntry) -> HandleEntry:
        """An entry that holds, with those of other models' encodings that were made of it here, and no others."""
        also = entry.get("also")
        if also is None:
            return entry
        kept = {
            model: plain
            for model, plain in (also.items() if isinstance(also, Mapping) else ())
            if self._is_encoded(entry, plain) and model == model_of(plain) != model_of(entry["handle"])
        }
        return entry if kept == also else HandleEntry(**{**entry, "also": kept})

    def as_proven(self, message: BaseMessage) -> BaseMessage:
        """A message that says of itself only what is true; what nobody proves is kept apart."""
        claim = claim_of(message)
        if claim is None:
            return message if NOTED not in message.response_metadata else stripped(message)
        signed = {name: message.additional_kwargs.get(name) for name in SIGNED}
        said_of_it = (self.name, message.id, message.type, said(message), signed, NOTED in message.response_metadata)
        sealed_by = claim.seals.get("words")
        if self._seals.remembers(sealed_by, "message", said_of_it):
            return message
        if not self.proves(message):
            claimed = {"author": claim.author, "persona": claim.persona, "confidential": claim.confidential}
            return stripped(message, claimed)
        digest, identity = claim.seals.get("digest"), claim.seals.get("identity")
        if self._seals.holds(sealed_by, "words", [identity, digest, claim.rest]):
            self._seals.remember(str(sealed_by), "message", said_of_it)
            return message
        # Who said it is true, what else it says is not: how its turn starts is then told by its node's name.
        if NOTED not in message.response_metadata:
            signed = {name: value for name, value in message.additional_kwargs.items() if name != STEP}
            return message.model_copy(update={"additional_kwargs": signed})
        noted = {name: value for name, value in said(message).items() if name not in claim.rest}
        noted |= {"speaker": claim.author.rpartition("|")[2], "seals": {**claim.seals, "digest": None}}
        return message.model_copy(update={"response_metadata": {**message.response_metadata, NOTED: noted}})

    def signed(self, message: BaseMessage, author: str, step: str, *, confidential: bool = False) -> BaseMessage:
        """A message that a plain node, or an agent's own function, wrote in this step of a run."""
        marks = {SOURCE: author, STEP: step} | ({CONFIDENTIAL: True} if confidential else {})
        bare = stripped(message)
        return self.sealed(bare.model_copy(update={"additional_kwargs": {**bare.additional_kwargs, **marks}}))

    def _marks(self, identity: str, words: str) -> dict[str, Any]:
        return {"conversation": self.name, "scope": self.scope, "identity": identity, "words": words}

    def _is_here(self, seals: Mapping[str, Any], scope: str | None) -> bool:
        return seals.get("conversation") == self.name and scope in (None, seals.get("scope"))

    def _identity(self, message: BaseMessage, claim: Claim, scope: str) -> str:
        return self._seals.seal("identity", self._identity_content(message, claim, scope))

    def _identity_content(self, message: BaseMessage, claim: Claim, scope: Any) -> list[Any]:
        # A person's words do not become an instruction, nor an agent's a person's: its type is part of who said it.
        said_by = [claim.author, claim.persona, claim.confidential, NOTED in message.response_metadata]
        return [self.name, scope, message.id, message.type, *said_by]

    def _is_encoded(self, entry: Mapping[str, Any], plain: object) -> bool:
        """Whether a plain handle was sealed for an entry's words."""
        try:
            handle = MessageHandle.model_validate(plain)
        except ValidationError:
            return False
        seals = entry["seals"].get("handles")
        seal = seals.get(handle.id) if isinstance(seals, Mapping) else None
        return self._seals.holds(seal, "entry handle", self._encoded(entry, handle, entry["seals"].get("scope")))

    def _encoded(self, entry: Mapping[str, Any], handle: MessageHandle, scope: Any = None) -> list[Any]:
        # Not the superstep: what reads input side by side may count otherwise.
        said = [entry.get(name) for name in ("message_id", "author", "persona", "confidential", "digest")]
        return [self.name, self.scope if scope is None else scope, *said, handle.plain()]

    def _entry_identity(self, entry: HandleEntry, scope: str) -> str:
        return self._seals.seal("entry identity", self._entry_content(entry, scope))

    def _entry_content(self, entry: Mapping[str, Any], scope: Any) -> list[Any]:
        names = ("message_id", "author", "persona", "confidential", "superstep", "branch", "call")
        return [self.name, scope, *(entry.get(name) for name in names)]


def found_conversation(
    seals: Seals, entries: Iterable[object], messages: Iterable[BaseMessage], scope: str | None = None
) -> str | None:
    """The id of the conversation that the first of these which is sealed belongs to; None: none is.

    Args:
        seals: The tenant's.
        entries: In any form, from anybody; as are the `messages`.
        scope: See `Conversation.proves`.
    """
    for entry in entries:
        marks = entry.get("seals") if isinstance(entry, Mapping) else None
        name = marks.get("conversation") if isinstance(marks, Mapping) else None
        if isinstance(name, str) and Conversation(seals, name, "").holds(entry, scope):
            return name
    for message in messages:
        claim = claim_of(message)
        name = None if claim is None else claim.seals.get("conversation")
        if isinstance(name, str) and Conversation(seals, name, "").proves(message, scope):
            return name
    return None


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in (*_OF_ONE_BRANCH, *_BY_MODEL)}
