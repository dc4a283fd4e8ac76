"""Answers of chat models as messages with handles: the reference to a handle is signed with the answer, and verified
where answers are merged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine, EphemeralRun
from choreo_agents.errors import HandleError, LineageWarning
from choreo_agents.graph.keeping import thread_in
from choreo_agents.graph.langgraph_internals import is_nested, run_step_of
from choreo_agents.graph.nesting import author_of
from choreo_agents.graph.signer import digest_of, handle_of, note_of, persona_of, signing
from choreo_agents.kv.handle import MessageHandle

_ENCODED = "encoded"
"""Key in a note: digest of the text that its handle encodes; empty: the handle encodes more than the text."""

NO_REFERENCE = "it is not an answer of a ChatChoreo or an Agent on this engine: pass such an answer unchanged"
_CUT = "its encoding includes the stop text: decode it without `stop`"
_UNKNOWN = "this engine has no such encoding for this tenant: it was deleted, or another engine or tenant made it"
UNPROVEN = "its signature is missing or invalid: pass the message unchanged, in the thread and tenant that made it"


class AnswerSigner:
    """Signer of a chat model's answers in one run, which also verifies them.

    Args:
        config: Config of the model's call.
    """

    def __init__(self, config: RunnableConfig) -> None:
        self._config = config

    @property
    def thread(self) -> str | EphemeralRun | None:
        """Thread that leases KV of the run; None: the call is outside of runs."""
        return thread_in(self._config) if is_nested(self._config) else None

    def signed(self, engine: Engine, message: AIMessage, handle: MessageHandle, is_whole: bool) -> AIMessage:
        """Return an answer with a signed reference to its handle; in a run, with the calling node as its author.

        Args:
            engine: Engine that decoded it as `handle`.
            is_whole: Whether the handle encodes exactly the message.
        """
        encoded = digest_of(message) if is_whole else ""
        note = {"handle": handle.id, "model": handle.model, "length": handle.length, _ENCODED: encoded}
        if is_nested(self._config):
            # The same fields as `sign` would add when the node returns the message: it leaves signed ones alone.
            note |= {"author": author_of(self._config), "step": run_step_of(self._config), "confidential": False}
        return signing(self._config, engine.lineage.seals).sign_message(message, note)

    def merged(self, engine: Engine, messages: Sequence[BaseMessage]) -> list[MessageHandle | BaseMessage]:
        """Return the handle of each answer, or, with a warning, the message itself if its handle cannot be used."""
        signer = signing(self._config, engine.lineage.seals)
        parents: list[MessageHandle | BaseMessage] = []
        lost: list[str] = []
        for message in messages:
            is_proven, claims = signer.proves(message), "handle" in note_of(message)
            encoding = encoding_of(message, [engine]) if is_proven else UNPROVEN if claims else None
            parents.append(encoding if isinstance(encoding, MessageHandle) else message)
            if not isinstance(encoding, MessageHandle):
                lost.append(f"{message.id!r} ({encoding or NO_REFERENCE})")
        if lost:
            warnings.warn(f"merged messages are encoded again from their text: {'; '.join(lost)}", LineageWarning, 5)
        return parents


def warn_unencoded(reader: str, reasons: Mapping[str, str]) -> None:
    """Warn of the authors whose messages a node must encode again from text, with the reason for each."""
    if reasons:
        named = "; ".join(f"{author!r} ({why})" for author, why in reasons.items())
        warnings.warn(f"{reader!r} reads the text instead of the KV of {named}", LineageWarning, stacklevel=2)


def answers_in(messages: Iterable[BaseMessage]) -> list[MessageHandle]:
    """Return the handles that the notes of messages refer to. The notes must be verified."""
    return [handle for message in messages if (handle := _reference(message)) is not None]


def _reference(message: BaseMessage) -> MessageHandle | None:
    """Return the handle in a message's note, if a chat model answered it in a function."""
    return None if persona_of(message) is not None else handle_of(message)


def encoding_of(message: BaseMessage, engines: Iterable[Engine]) -> MessageHandle | str | None:
    """Return the handle that a message's verified note refers to.

    Args:
        message: Message of the graph's state.
        engines: Engines that serve the graph.

    Returns:
        The handle, or why it cannot be used and what to do; None: there is no reference.
    """
    handle = _reference(message)
    if handle is None:
        return None
    if (encoded := note_of(message).get(_ENCODED)) != digest_of(message):
        return _CUT if encoded == "" else "its text was edited: pass the message unchanged"
    engine = next((engine for engine in engines if engine.model.adapter.fingerprint == handle.base_model), None)
    if engine is None:
        return "another model gave it: pass ChatChoreo the engine that reads it"
    try:
        engine.usage(handle)
    except HandleError:
        return _UNKNOWN
    return handle
