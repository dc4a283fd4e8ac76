"""The door through which input comes into a graph's state. What has no seal of the conversation is a client's."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from langchain_core.messages import BaseMessage, RemoveMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Send, StateSnapshot

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.langgraph_internals import SENDS, is_nested, overwritten
from choreo_agents.graph.provenance.conversation import Conversation, found_conversation
from choreo_agents.graph.provenance.limits import require_few
from choreo_agents.graph.provenance.notary import Notary, warn_unproven
from choreo_agents.graph.provenance.notes import (
    NOTED,
    SIGNED,
    claim_of,
    digest_of,
    drops_thoughts,
    is_edited,
    stripped,
)
from choreo_agents.graph.provenance.updates import Change, listed_messages, rewritten
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE

_OURS = "choreo_"
"""What a `Send` of ours tells its target under names that start so: no client has that to say."""


class Door:
    """Of one run.

    What no seal of the thread's conversation proves is input's own. It neither replaces nor removes what others said:
    in the place of another's message it is a message of its own. An empty thread may be given a conversation.

    Args:
        notary: Of the run; None: nobody can seal, and nothing is proven.
        called: The config of the run.
        saved: Of the state that the thread is in; None: it keeps none.
    """

    def __init__(self, notary: Notary | None, called: RunnableConfig, saved: RunnableConfig | None) -> None:
        self._notary = notary
        # What a graph around this one hands on is no input: it came through that one's door.
        self._is_open = is_nested(called)
        self._saved = saved

    def asks(self, given: Any) -> RunnableConfig | None:
        """What to ask for the state with which input has to be compared; None: there is none, or nothing to compare."""
        return None if self._is_open or not _is_judged(given) else self._saved

    def admitted(self, given: Any, snapshot: StateSnapshot | None = None) -> Any:
        """Input as it may come into the state: its messages named, and of nobody but whom their seals prove.

        Args:
            given: As the graph was called with it.
            snapshot: The state, if the door asks for it.
        """
        if given is None or self._is_open:
            return given
        values = None if snapshot is None else snapshot.values
        return _Admission(given, self._notary, values if isinstance(values, Mapping) else {}).admitted()


class _Admission:
    """Of one input.

    Args:
        given: The input, or what it sends to a node in place of the state.
        notary: Of the run.
        held: The values of the state.
        around: Of the input that sends it; None: it is the input.
    """

    def __init__(
        self, given: Any, notary: Notary | None, held: Mapping[str, Any], around: _Admission | None = None
    ) -> None:
        self._given = given
        self._notary = notary
        self._state = held
        messages = held.get("messages")
        standing = [each for each in messages or [] if isinstance(each, BaseMessage)]
        entries: list[Any] = list(held.get("handles") or [])
        self._held = {str(message.id): message for message in standing}
        self._entered = {str(entry["message_id"]): entry for entry in entries}
        self._scope = None if notary is None else notary.scope
        self._is_sent = around is not None
        self._here: Conversation | None = self._conversation(entries, standing) if around is None else around._here
        self._refused = False
        self._brought = self._brought_entries()

    def _conversation(self, entries: Sequence[Any], messages: Sequence[BaseMessage]) -> Conversation | None:
        """That of the thread; of an empty one, that which the input brings."""
        if self._notary is None:
            return None
        seals = self._notary.seals
        if entries or messages:
            name = found_conversation(seals, entries, messages)
        else:
            name = found_conversation(seals, *_brought(self._given), self._scope)
        return None if name is None else Conversation(seals, name, self._notary.scope)

    def _brought_entries(self) -> dict[str, Mapping[str, Any]]:
        """Entries of what others have said that come with the input: in these words it is theirs, in others not."""
        here = self._here
        good = [] if here is None else [each for each in _brought(self._given)[0] if here.holds(each, self._scope)]
        return {str(each["message_id"]): each for each in good if each["author"] != START_SOURCE}

    def admitted(self) -> Any:
        let_in = _everywhere(self._given, {"messages": self._messages, "handles": self._entries}, self._sent)
        if self._refused and self._notary is not None:
            warn_unproven(self._notary.seals)
        return let_in

    def _messages(self, value: Any) -> Any:
        is_overwrite, written = overwritten(value)
        require_few("messages", written)
        try:
            given = list(listed_messages(written)) if written else []
        except (NotImplementedError, ValueError) as error:
            if not is_overwrite:
                return value  # LangGraph says what is wrong with it
            raise InvalidRequestError(f"input would overwrite messages with what is no message: {error}") from error
        last = max((at for at, each in enumerate(given) if each.id == REMOVE_ALL_MESSAGES), default=None)
        if self._is_sent:
            given = [each for each in given if not isinstance(each, RemoveMessage)]
        elif is_overwrite or last is not None:
            own = [name for name in self._held if not self._is_others(name)]
            given = [*map(_removal, own), *given[0 if last is None else last + 1 :]]
        return [let_in for message in given if (let_in := self._let_in(message)) is not None]

    def _let_in(self, message: BaseMessage) -> BaseMessage | None:
        """A message as it may come in; None: it has nothing to say."""
        name = str(message.id)
        if isinstance(message, RemoveMessage):
            if self._is_others(name):
                self._refused = True
                return None
            self._held.pop(name, None)
            return message
        proven = self._proves(message)
        message = message if proven else self._as_input(message)
        if message.id is None:
            message = message.model_copy(update={"id": str(uuid.uuid4())})
        elif self._is_others(name):
            standing = self._held.get(name)
            same = standing is not None and _repeats(message, digest_of(standing))
            if same or (proven and standing is not None and not self._is_as_sealed(standing)):
                return standing if self._is_sent else None  # it stands there, or was edited by whoever may
            if not proven and (standing is not None or not _repeats(message, self._digest_brought(name))):
                self._refused = True
                message = message.model_copy(update={"id": str(uuid.uuid4())})
        self._held[str(message.id)] = message
        return message

    def _is_others(self, name: str) -> bool:
        """Whether the message of that name, in the state or removed from it, is not input's own, as far as is said."""
        standing, entry = self._held.get(name), self._entered.get(name, self._brought.get(name))
        others = entry is not None and entry.get("author") != START_SOURCE
        return others or (standing is not None and _claims(standing))

    def _digest_brought(self, name: str) -> str | None:
        return self._brought.get(name, {}).get("digest")

    def _is_as_sealed(self, message: BaseMessage) -> bool:
        return self._here is not None and self._here.proves(message) and not is_edited(message)

    def _proves(self, message: BaseMessage) -> bool:
        return self._here is not None and self._here.proves(message, self._scope)

    def _as_input(self, message: BaseMessage) -> BaseMessage:
        if not _claims(message):
            return message
        self._refused = self._refused or claim_of(message) is not None
        return stripped(message)

    def _entries(self, value: Any) -> list[HandleEntry]:
        """Those that are sealed for this conversation, of messages that have none."""
        _, written = overwritten(value)
        given: list[HandleEntry] = written if isinstance(written, list) else []
        here = self._here
        good = [here.as_encoded(each) for each in given if here is not None and here.holds(each, self._scope)]
        self._refused = self._refused or len(good) < len(given)
        if self._is_sent:
            return [entry for entry in good if self._stands(entry)]
        return [entry for entry in good if entry["message_id"] not in self._entered]

    def _stands(self, entry: HandleEntry) -> bool:
        """Whether an entry is of a message as it now reads, or of one that is not there."""
        standing = self._held.get(entry["message_id"])
        return standing is None or entry["digest"] == digest_of(standing)

    def _sent(self, payload: Any) -> Any:
        """What an input's own `Send` hands to a node, in place of the state: what others said there stays theirs."""
        if isinstance(payload, Mapping):
            payload = {name: value for name, value in payload.items() if not name.startswith(_OURS)}
        door = _Admission(payload, self._notary, self._state, self)
        let_in = rewritten(payload, {"messages": door._messages, "handles": door._entries})
        self._refused = self._refused or door._refused
        return let_in


def _repeats(message: BaseMessage, digest: str | None) -> bool:
    """Whether a message says what a digest was made of; many clients give back words alone."""
    return digest_of(message) == digest or drops_thoughts(message, digest)


def _is_judged(given: Any) -> bool:
    """Whether input has to be compared with the state: it names messages that may stand there, or handles."""
    found: list[bool] = []

    def messages(value: Any) -> Any:
        is_overwrite, written = overwritten(value)
        found.append(is_overwrite or any(each.id is not None or _claims(each) for each in _readable(written)))
        return value

    def handles(value: Any) -> Any:
        found.append(bool(value))
        return value

    _everywhere(given, {"messages": messages, "handles": handles})
    return any(found)


def _everywhere(given: Any, changes: Mapping[str, Change], sent: Any = None) -> Any:
    """Input in any form, with other values for some channels, also in what it sends."""
    change_sent = partial(rewritten, changes=changes) if sent is None else sent
    if isinstance(given, Command) and given.goto:
        given = dataclasses.replace(given, goto=_forwarded(given.goto, change_sent))
    return rewritten(given, {**changes, SENDS: partial(_forwarded, change=change_sent)})


def _forwarded(sends: Any, change: Change) -> list[Any]:
    """Sends, and names of nodes, with other states for their targets."""
    listed = sends if isinstance(sends, list | tuple) else [sends]
    return [Send(each.node, change(each.arg)) if isinstance(each, Send) else each for each in listed]


def _brought(given: Any) -> tuple[list[Any], Iterator[BaseMessage]]:
    """The entries and messages of input."""
    entries: list[Any] = []
    messages: list[Any] = []

    def handles_in(value: Any) -> Any:
        _, written = overwritten(value)
        entries.extend(written if isinstance(written, list) else [])
        return value

    def messages_in(value: Any) -> Any:
        messages.append(overwritten(value)[1])
        return value

    _everywhere(given, {"handles": handles_in, "messages": messages_in})
    return entries, chain.from_iterable(map(_readable, messages))


def _readable(written: Any) -> Iterator[BaseMessage]:
    """What was written to a messages channel, as far as it is messages."""
    try:
        yield from listed_messages(written) if written else []
    except (NotImplementedError, ValueError):
        return


def _claims(message: BaseMessage) -> bool:
    """Whether anything of ours stands on a message, true or not."""
    return NOTED in message.response_metadata or any(name in message.additional_kwargs for name in SIGNED)


def _removal(name: str) -> RemoveMessage:
    return RemoveMessage(id=name)
