"""Who said what, as far as signatures prove it.

Chat messages bear notes of who said them, and entries in `handles` name their authors: anybody can write both. What a
`Signer` has made of them is true, of the thread that it was made in. It is asked in three places: where input comes
(`InputFilter`), where plain nodes write (`sign`), and where an agent reads (`ProvenState`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from typing import Any

from langchain_core.messages import BaseMessage, RemoveMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Overwrite, Send, StateSnapshot

from choreo_agents.engine.messages.seals import Seals
from choreo_agents.errors import InvalidRequestError, VisibilityError
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
from choreo_agents.graph.signer import (
    MARK,
    UNPROVEN,
    Change,
    Signer,
    claimed_in,
    digest_of,
    is_edited,
    listed_messages,
    note_of,
    repeats,
    rewritten,
    stripped,
    writer_of,
)
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE

MOST_MESSAGES = 100_000
"""That come as input, or that an agent reads: each call goes over all of them."""
_NOTED = ("author", "persona", "confidential", "handle", "model", "length", "speaker", "header")
"""What an agent notes on its message, or what speaks for it."""


# The run's signer


def signer_for(called: RunnableConfig, seals: Seals | None, name: str) -> Signer | None:
    """Return the signer of a graph's nodes: that of the graph around, in the same thread; None: there is nobody.

    Args:
        called: The config that the graph runs with.
        seals: Of the graph's own engine; None: it has none, and signs as the graph around it.
        name: The graph's.
    """
    outer, place = RunContext.of(called).signer, [name, thread_of(called)]
    around = path_of(called) if is_nested(called) else ()
    if outer is None:
        return None if seals is None else signing(called, seals) if is_nested(called) else Signer(seals, place)
    # A key that no salt gives again is an engine's own: what is said in one thread goes out under one.
    own = outer.seals if seals is None or not seals.salted else seals
    graph = around if not around or outer.graph == around[:-1] else None
    return Signer(own, outer.place if outer.place[1] == place[1] else place, graph)


def signing(config: RunnableConfig, seals: Seals) -> Signer:
    """Return who signs in a node's run; in a graph of LangGraph's own, which agents side by side do not know by name,
    who signs under these seals."""
    place = ["" if saver_of(config) is None else None, thread_of(config)]
    return RunContext.of(config).signer or Signer(seals, place, graph=None)


# What updates of a state may say


def require_few(name: str, listed: Any) -> None:
    """Raise `InvalidRequestError` if what a channel holds, or is given, is more than `MOST_MESSAGES`."""
    if isinstance(listed, list | tuple) and len(listed) > MOST_MESSAGES:
        raise InvalidRequestError(
            f"{name!r} of the state would hold {len(listed):,} messages, at most {MOST_MESSAGES:,}: remove those that "
            "nobody is to see any more (RemoveMessage), or begin another thread with a summary"
        )


class InputFilter:
    """Filter of one run's input.

    Where the thread's state is kept, that says who said what, and nothing that input brings; else what is signed does,
    of a message in its very words. All other words are input's own. They neither replace nor remove what others said:
    in the place of another's message stands a message of its own.

    Args:
        signer: Of the run; None: it has no agents, and nobody reads.
        called: The config of the run.
        saved: Of the state that the thread is in; None: none is kept.
    """

    def __init__(self, signer: Signer | None, called: RunnableConfig, saved: RunnableConfig | None) -> None:
        # What a graph around this one hands on has passed that one's filter.
        self._signer = None if is_nested(called) else signer
        self._saved = saved
        self._standing: dict[str, BaseMessage] = {}
        self._entries: dict[str, HandleEntry] = {}

    def compares(self, given: Any) -> RunnableConfig | None:
        """Return what to ask for the state that input is compared with; None: there is none, or no need."""
        named: list[bool] = []

        def messages(value: Any) -> Any:
            is_overwrite, written = overwritten(value)
            require_few("messages", written)
            named.append(is_overwrite or any(each.id is not None for each in listed_messages(written or [])))
            return value

        _everywhere(given if self._signer else None, {"messages": messages}, lambda payload: named.append(True))
        return self._saved if any(named) else None

    def admitted(self, given: Any, snapshot: StateSnapshot | None = None) -> Any:
        """Return input as it may come into the state.

        Args:
            given: As the graph was called with it.
            snapshot: The state, if `compares` asks for it.
        """
        if given is None or self._signer is None:
            return given
        if self._saved is None:
            brought = {"handles": self._handles}  # words may come before the entries that are of them
            _everywhere(given, brought, partial(rewritten, changes=brought))
        elif snapshot is not None:
            self._standing = by_id(snapshot.values.get("messages"))
            self._entries = {entry["message_id"]: entry for entry in snapshot.values.get("handles") or []}
        return _everywhere(given, {"messages": self._messages, "handles": self._handles}, self._sent)

    def _messages(self, value: Any, *, is_sent: bool = False) -> Any:
        is_overwrite, written = overwritten(value)
        given = listed_messages(written or [])
        last = max((at for at, each in enumerate(given) if each.id == REMOVE_ALL_MESSAGES), default=None)
        if is_sent:
            given = [each for each in given if not isinstance(each, RemoveMessage)]
        elif is_overwrite or last is not None:
            own = [RemoveMessage(id=name) for name in self._standing if not self._is_others(name)]
            given = [*own, *given[0 if last is None else last + 1 :]]
        return [kept for message in given if (kept := self._message(message, is_sent=is_sent)) is not None]

    def _message(self, message: BaseMessage, *, is_sent: bool) -> BaseMessage | None:
        """Return a message as it may come in; None: it has nothing to say."""
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
            return standing if is_sent else None  # many clients give back words alone
        if self._saved is None and entry is not None and repeats(message, entry["digest"]):
            return stripped(message)
        self._signer.warn()
        return None if isinstance(message, RemoveMessage) else stripped(message.model_copy(update={"id": None}))

    def _is_others(self, name: str) -> bool:
        """Tell whether the message of that name, there or removed, is not input's own."""
        author = self._entries[name]["author"] if name in self._entries else START_SOURCE
        return author != START_SOURCE or (name in self._standing and "author" in note_of(self._standing[name]))

    def _handles(self, value: Any, *, is_sent: bool = False) -> list[HandleEntry]:
        assert self._signer is not None
        _, written = overwritten(value)
        given: list[Any] = written if isinstance(written, list) else []
        signed = [entry for each in given if (entry := self._signer.proven(each)) is not None]
        if len(signed) < len(given):
            self._signer.warn()
        if self._saved is None:
            self._entries |= {entry["message_id"]: entry for entry in signed}
            return signed
        held = [(entry, self._standing.get(entry["message_id"])) for entry in signed if is_sent]
        return [entry for entry, there in held if there is not None and entry["digest"] == digest_of(there)]

    def _sent(self, payload: Any) -> Any:
        """Return what input's own `Send` may hand to a node in place of the state."""
        if isinstance(payload, Mapping):
            # What a `Send` of ours tells its target under these names no client has to say.
            payload = {name: value for name, value in payload.items() if not name.startswith(MARK)}
        changes = {"messages": partial(self._messages, is_sent=True), "handles": partial(self._handles, is_sent=True)}
        return rewritten(payload, changes)


def _everywhere(given: Any, changes: Mapping[str, Change], sent: Change) -> Any:
    """Return input in any form with other values for some channels, and for what it sends."""
    changes = {**changes, SENDS: partial(_forwarded, change=sent)}
    return rewritten(given, {**changes, START_SOURCE: partial(rewritten, changes=changes)})  # LangGraph's own channel


def _forwarded(sends: Any, change: Change) -> list[Any]:
    """Return sends, and names of nodes, with other states for their targets."""
    listed = sends if isinstance(sends, list | tuple) else [sends]
    changed = [copy(each) if isinstance(each, Send) else each for each in listed]
    for each in changed:
        if isinstance(each, Send):
            each.arg = change(each.arg)
    return changed


def handed_on(
    sends: Any, config: RunnableConfig, said: Sequence[Any] = (), *, fresh: bool = False, other: Change | None = None
) -> list[Any]:
    """Return sends, and names of nodes, where what stands in the state goes on under the note that it has there.

    Args:
        sends: Where a node or a route sends control, in any form that LangGraph takes.
        config: Of that node, or of the one that the route is after.
        said: What the node says beside.
        fresh: Whether what the node has written stands there already, as it does for routes.
        other: What becomes of a message that does not stand there, in these words; None: it goes as it is.
    """

    standing = cache(lambda: {**_standing(config, fresh=fresh), **by_id(said)})

    def noted(given: Any) -> Any:
        if given is None:
            return None
        with suppress(NotImplementedError, ValueError):  # a function may be sent anything
            [message] = convert_to_messages([given])
            if (found := as_it_stands(message, standing().get(str(message.id)))) is not None:
                return found
        return given if other is None else other(given)

    def messages(written: Any) -> Any:
        return type(written)(map(noted, written)) if isinstance(written, list | tuple) else noted(written)

    return _forwarded(sends, partial(rewritten, changes={"messages": messages}))


def as_it_stands(message: BaseMessage, there: BaseMessage | None, *, edited: bool = False) -> BaseMessage | None:
    """Return a message with the note of the one that stands in its place, if that has these very words, or may be
    `edited`; else None."""
    if there is None or not (edited or message is there or repeats(message, digest_of(there))):
        return None
    return stripped(message, note_of(there))


def _standing(config: RunnableConfig, *, fresh: bool = False) -> dict[str, BaseMessage]:
    """Return the messages of the state that a node got, by id; `fresh`: of what it has made of that."""
    return by_id(channel_values(config, ("messages",), fresh=fresh).get("messages"))


def by_id(held: Any) -> dict[str, BaseMessage]:
    """Return the messages that a channel holds, by id."""
    return {str(message.id): message for message in held or [] if isinstance(message, BaseMessage)}


def sign(
    output: Any, config: RunnableConfig, node: str | None, persona: str | None = None, *, confidential: bool = False
) -> Any:
    """Sign the messages that a plain node adds, in any form of output that LangGraph takes, with the node's name.

    What it only hands on, or sends on, stays as it is: what stands in the state, people's and instructions with an id,
    what was said inside of it, and what others said in their own words. What an agent said in other words is the
    node's own, unless it is one of that agent's.

    Args:
        output: What the node returned.
        config: The node's, and `node` its name.
        persona: Whose node it is declared to be; None: its own.
        confidential: Whether what it adds of its own is a private context.

    Raises:
        InvalidRequestError: It wrote to the messages what is none.
    """
    signer, author = RunContext.of(config).signer, author_of(config, node)
    speaks_for = persona and "|".join([*author.split("|")[:-1], persona])

    def proves(message: BaseMessage) -> bool:
        return signer is not None and signer.proves(message)

    def is_its_own(message: BaseMessage) -> bool:
        """Tell whether a message is the node's: its own, of agents inside of it, or of whom it is declared to be."""
        names = [str(note_of(message).get(name) or author) for name in ("author", "persona")]
        inside = all(name == author or name.startswith(f"{author}|") for name in names)
        return proves(message) and (inside or speaks_for in names)

    def signed(message: BaseMessage, there: BaseMessage | None) -> BaseMessage:
        known = as_it_stands(message, there, edited=there is not None and is_its_own(there))
        if known is not None and not is_its_own(known):
            return known
        message = known or message
        is_proven, claimed = proves(message), note_of(message)
        if is_proven and not is_edited(message):
            return message
        is_somebodys = is_proven or (there is not None and "author" in note_of(there))
        if message.id is not None and message.type in ("human", "system") and not is_somebodys:
            return stripped(message)
        note = {"author": author, "step": run_step_of(config), "confidential": confidential}
        if is_its_own(message):
            note = {name: value for name, value in claimed.items() if name in _NOTED}
        elif not is_proven and persona is not None:  # a client may have written that, for the node to hand on
            note |= {name: speaks_for for name in ("author", "persona") if claimed.get(name) == speaks_for}
        named = message if message.id is not None else message.model_copy(update={"id": str(uuid.uuid4())})
        # In a graph of LangGraph's own nobody signs: who reads it keeps it from whom its node is kept.
        return stripped(named, note) if signer is None else signer.noted(named, note)

    def put_on(added: Any) -> Any:
        is_overwrite, given = overwritten(added)
        try:
            messages = listed_messages([] if given is None else given)
        except (NotImplementedError, ValueError) as error:
            # Passed on unsigned it would count as input, and be shown to those from whom its node is hidden.
            raise InvalidRequestError(f"node {author!r} wrote to messages what is no message: {error}") from error
        standing = _standing(config)
        messages = [m if m.type == "remove" else signed(m, standing.get(str(m.id))) for m in messages]
        return Overwrite(messages) if is_overwrite else messages

    return rewritten(output, {"messages": put_on, SENDS: partial(handed_on, config=config)})


def require_silent(output: Any, config: RunnableConfig, node: str) -> Any:
    """Return the output of a node that is declared to say nothing; it may send on what stands in the state.

    Raises:
        VisibilityError: It says something, in any form of output that LangGraph takes.
    """

    def refuse(channel: str, _: Any) -> Any:
        raise VisibilityError(
            f"node {author_of(config, node)!r} was added with writes=(), and writes {channel!r}: leave one of them out"
        )

    changes = {channel: partial(refuse, channel) for channel in ("messages", "handles")}
    return rewritten(output, {**changes, SENDS: partial(handed_on, config=config, other=changes["messages"])})


# What an agent may believe


class ProvenState:
    """Words and entries of a graph's state, as far as it is proven to one agent who said them.

    Args:
        state: Of the graph, as the agent gets it.
        config: The agent's.
        seals: Of its engine, for graphs of LangGraph's own.

    Raises:
        InvalidRequestError: The state holds more than `MOST_MESSAGES`.
    """

    def __init__(self, state: Any, config: RunnableConfig, seals: Seals) -> None:
        messages, self.signer = with_ids(_channel(state, "messages")), signing(config, seals)
        # Then other words than a note's are an operator's edit: all that the agent reads was filtered, or signed.
        is_guarded = self.signer.graph == path_of(config)[:-1]
        said = by_id(messages)
        proven = {name: message for name, message in said.items() if self.signer.proves(message)}
        writers = {name: writer_of(each) for name, each in proven.items() if is_guarded or not is_edited(each)}
        self.entries: list[HandleEntry] = []
        self._claims: dict[str, dict[str, Any]] = {}
        held = _channel(state, "handles")
        named = {each.get("message_id") for each in held if isinstance(each, dict)}
        # What a graph around hands in is of words that came in here: a branch sees no more than it was sent.
        given_here = (each for each in RunContext.of(config).given if each["message_id"] in said.keys() - named)
        for given in [*held, *given_here]:
            entry = self.signer.proven(given)
            is_input = isinstance(given, dict) and given.get("author") == START_SOURCE
            if entry is not None and (is_input or _is_of(entry, said, writers)):
                self.entries.append(entry)
            elif isinstance(given, dict) and not is_input:
                self._claims[str(given.get("message_id"))] = claimed_in(given)
                self.signer.warn()
        self.messages = [each if str(each.id) in writers else self._unproven(each) for each in messages]
        self.superstep = 1 + max((entry["superstep"] for entry in self.entries), default=-1)
        """The earliest that something can be said in now. What was removed since was said all the same: who speaks
        behind it does not stand in its place."""

    def _unproven(self, message: BaseMessage) -> BaseMessage:
        """Return a message without a note; whose it says that it is, and is not proven to be, is kept apart."""
        note = note_of(message)
        claimed = claimed_in(note) if "author" in note else self._claims.get(str(message.id))
        if claimed is not None:
            self.signer.warn()
        return stripped(message, {UNPROVEN: claimed} if claimed else None) if note or claimed else message


def _is_of(entry: HandleEntry, said: Mapping[str, BaseMessage], writers: Mapping[str, str]) -> bool:
    """Tell whether an entry is of the message of its name: in these words, or in others by the same author."""
    name = entry["message_id"]
    return name not in said or entry["author"] == writers.get(name) or entry["digest"] == digest_of(said[name])


def with_ids(messages: Sequence[Any]) -> list[BaseMessage]:
    """Return messages in any form that LangChain takes. Those without an id, which LangGraph would have given, get one
    that is the same for every reader."""
    found = convert_to_messages(messages)
    for place, message in enumerate(found):
        if message.id is None:
            message.id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{place} {message.type} {message.text}"))
    return found


def _channel(state: Any, name: str) -> Sequence[Any]:
    listed = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
    require_few(name, listed)
    return listed if isinstance(listed, list | tuple) else [listed] if listed else []
