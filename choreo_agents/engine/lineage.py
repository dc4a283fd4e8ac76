"""Messages as a store keeps them: out of the engine, and back into one that has never computed them.

row     from what it is computed: the same for whoever says it, wherever
note    what one thread says of it: who has said it, of whose words it was made
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.messages.message import Lineage, Message, Placement, Scope, Thought, Usage
from choreo_agents.engine.persistent_kv import kv_key
from choreo_agents.errors import ChoreoError, HandleError, UnknownHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.runtime.request import FinishReason
from choreo_agents.sampling import SampledToken

T = TypeVar("T")


class DamagedRowError(ChoreoError, ValueError):
    """An entry of a store that the tenant did not write there, or not in this form."""


@dataclass(frozen=True)
class LineageRow:
    """All that a message's KV is computed from."""

    id: str
    model: str
    """What makes its KV, as its handle says."""
    tokens: Annotated[tuple[int, ...], Field(min_length=1)]
    parents: tuple[tuple[str, int], ...]
    """Ids, and offsets relative to the message's first token."""
    at: int
    """The position of its first token where it was encoded."""

    def plain(self, others: Iterable[LineageRow] = ()) -> dict[str, Any]:
        """As `read` takes it. Of parents that stand where another row has them too, that row is named in their place:
        each message of a conversation reads what the one before has read.

        Args:
            others: Rows that whoever reads it will know.
        """
        own, shared, like = self._seen(), 0, ""
        for other in others:
            if (count := _alike(own, other._seen())) > shared:
                shared, like = count, other.id
        told: dict[str, Any] = {"id": self.id, "model": self.model, "tokens": [*self.tokens], "at": self.at}
        told["parents"] = [[*parent] for parent in own[shared:]]
        return told | ({"like": [like, shared]} if shared else {})

    @classmethod
    def read(cls, plain: Mapping[str, Any], known: Mapping[str, LineageRow]) -> LineageRow:
        """A row that `plain` wrote.

        Raises:
            DamagedRowError: It did not, or the row that it names is not known.
        """
        try:
            like, shared = plain.get("like") or ("", 0)
            row = _ROW.validate_python(plain)
            seen = [*(known[like]._seen()[:shared] if shared else ()), *row.parents]
            return replace(row, parents=tuple((each, stands - row.at) for each, stands in seen))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedRowError(f"it is damaged: {error!r}") from error

    def _seen(self) -> list[tuple[str, int]]:
        """Its parents, and the positions at which it has read them."""
        return [(each, self.at + offset) for each, offset in self.parents]


@dataclass(frozen=True)
class Note:
    """What a thread says of a message."""

    id: str
    author: str | None = None
    role: str | None = None
    label: str = ""
    origin: str = ""
    header: int = 0
    sampled: int | tuple[SampledToken, ...] | None = None
    """Tokens as they were chosen, with their log-probabilities; or, without such, how many of those behind its header.
    None: it was not decoded."""
    finish: FinishReason | None = None
    usage: Usage | None = None
    """What the call cost that made it."""
    authors: tuple[str, ...] = ()
    marked: bool = False
    is_thought: bool = False
    sources: tuple[str, ...] = ()
    """Ids of the messages whose words it encodes again, as far as the thread holds them."""
    foreign: tuple[MessageHandle, ...] = ()
    """Those that other models have said."""
    thoughts: tuple[tuple[str, str | None], ...] = ()
    """What was thought before it was said, and by which call."""

    def plain(self) -> dict[str, Any]:
        """As `read` takes it: without what is as usual."""
        plain: dict[str, Any] = _NOTE.dump_python(self, mode="json", exclude_defaults=True)
        return plain

    def merged(self, other: Note) -> Note:
        """With what was said later of the message in the same thread, by whichever process."""
        return replace(
            self,
            header=self.header or other.header,
            sampled=other.sampled if self.sampled is None else self.sampled,
            finish=other.finish or self.finish,
            authors=_both(self.authors, other.authors),
            marked=self.marked or other.marked,
            is_thought=self.is_thought or other.is_thought,
            sources=_both(self.sources, other.sources),
            foreign=_both(self.foreign, other.foreign),
            thoughts=_both(self.thoughts, other.thoughts),
        )

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Note:
        """A note that `plain` wrote.

        Raises:
            DamagedRowError: It did not.
        """
        try:
            return _NOTE.validate_python(plain)
        except ValueError as error:
            raise DamagedRowError(f"it is damaged: {error!r}") from error


_ROW, _NOTE = TypeAdapter(LineageRow), TypeAdapter(Note)


@dataclass
class ReadLog:
    """What a thread has written."""

    rows: dict[str, LineageRow] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    """All that was said of each message."""
    answers: dict[str, str] = field(default_factory=dict)
    """The ids of messages that answer calls, by the calls' idempotency keys: the last that did."""
    damaged: str | None = None
    """Why something in it is not believed."""


class DescribedMessage(NamedTuple):
    """A message as it is written."""

    row: LineageRow | None
    """None: the thread has written that."""
    note: Note
    memos: tuple[str, ...] = ()
    """The thread's calls that it answers."""


class LineageExchange:
    """What a tenant's messages are computed from, for those who keep it elsewhere: `engine.lineage`.

    Args:
        tenant: Whose.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self.seals = tenant.message_ids.seals
        """What tells whether something that comes back is what the tenant gave out."""

    @property
    def name(self) -> str:
        """What the tenant is called in a store; does not tell the salt."""
        return self._tenant.name

    def unknown(self, handles: Iterable[MessageHandle], thread: Scope) -> list[MessageHandle]:
        """Those of this engine's model that it does not know, or not as the thread's: what was released on purpose it
        does."""
        core, model = self._tenant.core, self._tenant.core.model.adapter.fingerprint
        with core.lock:
            self._tenant.require_open()
            return [handle for handle in handles if handle.base_model == model and self._is_unknown(handle, thread)]

    def recall(self, answered: Mapping[str, str], thread: Scope) -> list[str]:
        """Have the thread's calls answered so, by their idempotency keys; return the ids of those that it does not
        lease."""
        table = self._tenant.core.table
        with self._tenant.core.lock:
            found = [(memo, message_id, table.get(message_id)) for memo, message_id in answered.items()]
            for memo, _, message in found:
                if message is not None and message.scoped[thread] and table.memos.get(memo) is not message:
                    table.remember(memo, message, thread)
            return [each for _, each, message in found if message is None or not message.scoped[thread]]

    def described(
        self,
        handles: Iterable[MessageHandle],
        thread: Scope,
        noted: Mapping[str, Note],
        answered: Mapping[str, str],
        asked: str | None,
    ) -> list[DescribedMessage]:
        """Messages, and all that they come from, as they are to be written for a thread: what it has written is left
        out, unless more is to be said of it now.

        Args:
            handles: Leased messages; of others nothing is said.
            thread: The thread's scope.
            noted: What it has written of messages, by id.
            answered: The ids of those that it has written to answer its calls, by the calls' idempotency keys.
            asked: The call that was made now, whose answer takes the place of another's; of any other somebody else may
                have said more since.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_open()
            given = [core.table.get(each) for each in dict.fromkeys(handle.id for handle in handles)]
            waiting = [message for message in given if message is not None and message.tenant == self._tenant.name]
            seen = {message.handle.id for message in waiting}
            found = list[DescribedMessage]()
            for message in waiting:
                before, own = noted.get(message.handle.id), message.handle.id
                note = _note(message, thread, before)
                note = note if before is None else before.merged(note)
                memos = tuple(
                    memo
                    for memo, scope in message.idempotency_keys.items()
                    if scope is thread
                    and (memo not in answered or (answered[memo] != own and memo.rpartition(" ")[0] == asked))
                )
                if note == before and not memos:
                    continue
                row = row_of(message) if before is None else None
                found.append(DescribedMessage(row, note, memos))
                for each in _made_of(message, thread):
                    if each.handle.id not in seen and each.handle.id not in noted:
                        seen.add(each.handle.id)
                        waiting.append(each)
            return found

    def take_in(self, wanted: Sequence[str], found: ReadLog, thread: Scope) -> dict[str, str]:
        """Know messages as if they had been computed here: their KV is, from their own parents, when it is read.

        Args:
            wanted: Ids of those that the thread leases from now on.
            found: What the thread has written.
            thread: The thread's scope.

        Returns:
            Why those that could not be taken in were not, by id.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_open()
            taking = _TakingIn(self._tenant, found)
            for message_id in wanted:
                taking.make(message_id)
            taking.tell_all()
            if not thread.closed:
                for message_id in wanted:
                    taking.lease(message_id, thread)
            return taking.refused

    def held_by_thread_alone(self, ids: Iterable[str], thread: Collection[Scope]) -> list[str]:
        """Return the messages that no one leases but a thread, by its scopes, or no one at all."""
        table = self._tenant.core.table
        with self._tenant.core.lock:
            found = ((each, table.get(each)) for each in ids)
            return [
                name for name, each in found if each is None or each.leases == sum(each.scoped[it] for it in thread)
            ]

    def look_for_kv(self, ids: Iterable[str]) -> None:
        """See which messages have files, also of other processes: they are read from these in place of being computed.
        Slow.
        """
        if (kept := self._tenant.persistent_kv) is not None:
            for message_id in ids:
                kept.has(message_id)

    def _is_unknown(self, handle: MessageHandle, thread: Scope) -> bool:
        try:
            return not self._tenant.find(handle).scoped[thread]
        except UnknownHandleError:
            return True
        except HandleError:
            return False


class _TakingIn:
    """Under the engine's lock."""

    def __init__(self, tenant: Tenant, found: ReadLog) -> None:
        self._tenant, self._table, self._found = tenant, tenant.core.table, found
        self._memos = defaultdict[str, list[str]](list)
        """Of the calls that each message answers."""
        for memo, message_id in found.answers.items():
            self._memos[message_id].append(memo)
        self.made: dict[str, Message] = {}
        """By id: made now, or known before."""
        self.refused: dict[str, str] = {}
        self._told: set[str] = set()

    def make(self, message_id: str) -> None:
        """Make a message and all that it comes from, parents first; no recursion: a conversation may be long."""
        waiting = [message_id]
        while waiting:
            current = waiting[-1]
            row = self._found.rows.get(current)
            known = self._table.known(current)
            if current in self.made or current in self.refused:
                pass
            elif known is not None and known.tenant == self._tenant.name:
                self.made[current] = known
            elif row is None:
                self.refused[current] = "it is not in the store"
            elif above := [each for each, _ in row.parents if each not in self.made and each not in self.refused]:
                waiting += above
                continue
            else:
                self._make(row)
            waiting.pop()

    def _make(self, row: LineageRow) -> None:
        lost = next((each for each, _ in row.parents if each in self.refused), None)
        if lost is not None:
            self.refused[row.id] = f"it comes of {lost}, and {self.refused[lost]}"
            return
        adapter, mapper = _encoders(row.model)
        parents = tuple(self.made[each] for each, _ in row.parents)
        placement = Placement(tuple(row.at + offset for _, offset in row.parents), row.at)
        lineage = Lineage(row.tokens, parents, placement, self._tenant.name, adapter, mapper)
        handle, loaded = self._tenant.message_ids.handle(lineage), self._tenant.core.adapters
        if handle.id != row.id or handle.model != row.model:
            self.refused[row.id] = "another model has made it, or another tenant"
        elif (adapter and adapter not in loaded.loras) or (mapper and mapper not in loaded.mappers):
            self.refused[row.id] = f"the adapter {adapter or mapper!r} that encoded it is not loaded"
        else:
            note = self._found.notes.get(row.id, Note(row.id))
            usage = note.usage or Usage.of_existing(0)
            message = Message(handle, lineage, note.author, note.role, usage, note.label, note.origin)
            message.forgotten = True  # until somebody leases it: whoever has its words may encode them again
            self._table.fill(message, None)
            self.made[row.id] = message

    def tell_all(self) -> None:
        """Say of all that was made what the thread has said of it, and so on of what that makes."""
        while waiting := [message_id for message_id in self.made if message_id not in self._told]:
            for message_id in waiting:
                self._told.add(message_id)
                self._tell(message_id)

    def _tell(self, message_id: str) -> None:
        message, note = self.made[message_id], self._found.notes.get(message_id)
        if note is None:
            return
        message.authors |= {*note.authors}
        message.marked, message.is_thought = message.marked or note.marked, message.is_thought or note.is_thought
        message.header = message.header or note.header
        if note.sampled is not None and message.chosen is None:
            behind, sampled = message.tokens[note.header :], note.sampled
            message.chosen = tuple(map(SampledToken, behind[:sampled])) if isinstance(sampled, int) else sampled
        message.finish_reason = message.finish_reason or note.finish
        for source in note.sources:
            self.make(source)
            if (found := self.made.get(source)) is not None and found not in message.sources:
                message.sources.append(found)
        message.foreign += [foreign for foreign in note.foreign if foreign not in message.foreign]

    def lease(self, message_id: str, thread: Scope) -> None:
        """Have the thread lease a message, with what was thought before it, and remember which calls it answers."""
        message, note = self.made.get(message_id), self._found.notes.get(message_id)
        if message is None:
            return
        with self._table.entering(message) as entered:
            if not entered.scoped[thread]:
                self._table.lease(entered, thread)
        for thought_id, call in note.thoughts if note is not None else ():
            self.make(thought_id)
            thought = self.made.get(thought_id)
            known = [(each.message, each.call) for each in message.thoughts]
            if thought is not None and (thought, call) not in known and len(known) < message.leases:
                self.tell_all()
                self._table.lease(thought, thread)
                self._table.keep(message, Thought(thought, call, thread), thread)
                self._remember(thought, thread)
        self._remember(message, thread)

    def _remember(self, message: Message, thread: Scope) -> None:
        for memo in self._memos.get(message.handle.id, ()):
            if self._table.memos.get(memo) is not message and message.leases:
                self._table.remember(memo, message, thread)


def _made_of(message: Message, thread: Scope) -> list[Message]:
    """What a message attended to; and, as far as the thread has it, whose words it encodes and what was thought."""
    thoughts = [each.message for each in message.thoughts if each.scope is thread]
    return [*message.parents, *(each for each in message.sources if each.scoped[thread]), *thoughts]


def row_of(message: Message) -> LineageRow:
    """From what a message is computed."""
    key = kv_key(message)
    return LineageRow(key.id, key.model, key.tokens, key.parents, key.native_offset)


def _note(message: Message, thread: Scope, before: Note | None) -> Note:
    """What a thread says of a message now: what it held of others when it wrote before, it may hold no longer."""
    return Note(
        message.handle.id,
        message.author,
        message.role,
        message.label,
        message.origin,
        message.header,
        _sampled(message) if before is None or before.sampled is None else None,
        message.finish_reason,
        message.usage,
        tuple(sorted(message.authors)),
        message.marked,
        message.is_thought,
        tuple(each.handle.id for each in message.sources if each.scoped[thread]),
        tuple(message.foreign),
        tuple((each.message.handle.id, each.call) for each in message.thoughts if each.scope is thread),
    )


def _sampled(message: Message) -> int | tuple[SampledToken, ...] | None:
    chosen = message.chosen
    if chosen is None:
        return None
    behind = message.tokens[message.header : message.header + len(chosen)]
    return len(chosen) if chosen == tuple(map(SampledToken, behind)) else chosen


def _encoders(model: str) -> tuple[str, str]:
    """The fingerprints of adapter and mapper, of that of all that has made an encoding."""
    rest, _, mapper = model.partition("~")
    return rest.partition("+")[2], mapper


def _both(some: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys([*some, *others]))


def _alike(one: Sequence[tuple[str, int]], other: Sequence[tuple[str, int]]) -> int:
    """How many of the first are the same."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
