"""Answers of chat models as messages with handles: a reference is signed where the answer is given, and read back where
it is merged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine, EphemeralRun
from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import HandleError, LineageWarning
from choreo_agents.graph.keeping import thread_in
from choreo_agents.graph.langgraph_internals import is_nested, run_step_of
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.provenance import signing
from choreo_agents.graph.signer import digest_of, handle_of, note_of, persona_of
from choreo_agents.kv.handle import MessageHandle

_told: WeakKeyDictionary[Seals, set[tuple[str, str]]] = WeakKeyDictionary()
"""Of whom which reader was told, for each tenant of an engine."""
_ENCODED = "encoded"
"""In a note: the digest of the words that the handle beside it is the encoding of; empty: it is of more."""

NO_REFERENCE = "it is no answer of a ChatChoreo or an Agent: let one of this engine give it, and hand its message on"
_CUT = "what it stopped at stands in its encoding: have it end without a stop text"
_UNKNOWN = "this engine has no such encoding of this tenant's: it was forgotten, or another engine or tenant gave it"
UNPROVEN = "no signature proves its reference: hand on the message that this engine and tenant gave in this thread"


class AnswerSigner:
    """Signs what a chat model answers in the run that a config is of, and reads such answers back.

    Args:
        config: Of the model's call.
    """

    def __init__(self, config: RunnableConfig) -> None:
        self._config = config

    @property
    def thread(self) -> str | EphemeralRun | None:
        """Which keeps what is encoded in the run; None: the call is made in no run."""
        return thread_in(self._config) if is_nested(self._config) else None

    def signed(self, engine: Engine, message: AIMessage, handle: MessageHandle, is_whole: bool) -> AIMessage:
        """Return an answer with a signed reference to its encoding; in a run, as the message of the node that asks.

        Args:
            engine: Gave it; `handle` is its encoding.
            is_whole: Whether that says what the message does, and no more.
        """
        encoded = digest_of(message) if is_whole else ""
        note = {"handle": handle.id, "model": handle.model, "length": handle.length, _ENCODED: encoded}
        if is_nested(self._config):
            # As `sign` notes what a node writes: it lets this stand.
            note |= {"author": author_of(self._config), "step": run_step_of(self._config), "confidential": False}
        return signing(self._config, engine.lineage.seals).noted(message, note)

    def merged(self, engine: Engine, messages: Sequence[BaseMessage]) -> list[MessageHandle | BaseMessage]:
        """Return the encoding of each answer, or the message itself where only its words can be read: that is told."""
        signer = signing(self._config, engine.lineage.seals)
        found: list[MessageHandle | BaseMessage] = []
        lost: list[str] = []
        for message in messages:
            is_proven, claims = signer.proves(message), "handle" in note_of(message)
            encoding = encoding_of(message, [engine]) if is_proven else UNPROVEN if claims else None
            found.append(encoding if isinstance(encoding, MessageHandle) else message)
            if not isinstance(encoding, MessageHandle):
                lost.append(f"{message.id!r} ({encoding or NO_REFERENCE})")
        if lost:
            warnings.warn(f"merged messages are encoded again from their words: {'; '.join(lost)}", LineageWarning, 5)
        return found


def tell_words_of(engine: Engine, reader: str, words_of: Mapping[str, str]) -> None:
    """Warn, once for each of them, of whose words alone a node reads though it was to read encodings, and why."""
    told = _told.setdefault(engine.lineage.seals, set())
    new = {author: why for author, why in words_of.items() if (reader, author) not in told}
    told.update((reader, author) for author in new)
    if new:
        named = "; ".join(f"{author!r} ({why})" for author, why in new.items())
        warnings.warn(f"{reader!r} reads the words, and not the encodings, of {named}", LineageWarning, stacklevel=2)


def answers_in(messages: Iterable[BaseMessage]) -> list[MessageHandle]:
    """Return what the notes of messages refer to, which must be proven."""
    return [handle for message in messages if (handle := _reference(message)) is not None]


def _reference(message: BaseMessage) -> MessageHandle | None:
    """Return what a message's note refers to, if a chat model has answered it in a function."""
    return None if persona_of(message) is not None else handle_of(message)


def encoding_of(message: BaseMessage, engines: Iterable[Engine]) -> MessageHandle | str | None:
    """Return the encoding that a message's note, which is proven, refers to.

    Args:
        message: Of the graph's state.
        engines: Serve it.

    Returns:
        The handle, or why it is of no use and what to do; None: it refers to none.
    """
    handle = _reference(message)
    if handle is None:
        return None
    if (encoded := note_of(message).get(_ENCODED)) != digest_of(message):
        return _CUT if encoded == "" else "its words were edited: hand it on as the model gave it"
    engine = next((each for each in engines if each.model.adapter.fingerprint == handle.base_model), None)
    if engine is None:
        return "another model gave it: give ChatChoreo the engine that reads it"
    try:
        engine.usage(handle)
    except HandleError:
        return _UNKNOWN
    return handle
