"""Lineage of messages for a store: export it, and import it into an engine that has never computed them.

row     what a message's KV is computed from: the same for every author and engine
note    what one thread knows of it: its author, its usage, whose text it encodes
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
    """Everything that a message's KV is computed from."""

    id: str
    model: str
    """Fingerprint of what computes its KV, as in its handle."""
    tokens: Annotated[tuple[int, ...], Field(min_length=1)]
    parents: tuple[tuple[str, int], ...]
    """Parents' ids, and offsets relative to the message's first token."""
    at: int
    """Position at which its first token was encoded."""

    def plain(self, known_rows: Iterable[LineageRow] = ()) -> dict[str, Any]:
        """Return it as `read` takes it. A prefix of parents that another row also has is replaced by a reference to
        that row: each message of a conversation reads what the one before has read.

        Args:
            known_rows: Rows that the reader will know.
        """
        own, shared, like = self._placed_parents(), 0, ""
        for row in known_rows:
            if (count := _count_common(own, row._placed_parents())) > shared:
                shared, like = count, row.id
        plain: dict[str, Any] = {"id": self.id, "model": self.model, "tokens": [*self.tokens], "at": self.at}
        plain["parents"] = [[*parent] for parent in own[shared:]]
        return plain | ({"like": [like, shared]} if shared else {})

    @classmethod
    def read(cls, plain: Mapping[str, Any], rows: Mapping[str, LineageRow]) -> LineageRow:
        """Return the row that `plain` wrote.

        Raises:
            DamagedRowError: It is not of that form, or refers to an unknown row.
        """
        try:
            like, shared = plain.get("like") or ("", 0)
            row = _ROW.validate_python(plain)
            parents = [*(rows[like]._placed_parents()[:shared] if shared else ()), *row.parents]
            return replace(row, parents=tuple((parent, stands - row.at) for parent, stands in parents))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedRowError(f"it is damaged: {error!r}") from error

    def _placed_parents(self) -> list[tuple[str, int]]:
        """Return its parents with the positions at which it has read them."""
        return [(parent, self.at + offset) for parent, offset in self.parents]


@dataclass(frozen=True)
class Note:
    """A thread's record of a message."""

    id: str
    author: str | None = None
    role: str | None = None
    label: str = ""
    origin: str = ""
    header: int = 0
    sampled: int | tuple[SampledToken, ...] | None = None
    """Sampled tokens with their log-probabilities; or, without such, how many sampled tokens follow its header. None:
    it was not decoded."""
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Usage of the call that made it."""
    authors: tuple[str, ...] = ()
    marked: bool = False
    is_thought: bool = False
    sources: tuple[str, ...] = ()
    """Ids of the messages whose text it encodes again, as far as the thread leases them."""
    foreign: tuple[MessageHandle, ...] = ()
    """Messages of other models whose text it encodes."""
    thoughts: tuple[tuple[str, str | None], ...] = ()
    """Ids of the thoughts before it, each with its call's idempotency key."""

    def plain(self) -> dict[str, Any]:
        """Return it as `read` takes it, without default values."""
        plain: dict[str, Any] = _NOTE.dump_python(self, mode="json", exclude_defaults=True)
        return plain

    def merged(self, later: Note) -> Note:
        """Return it merged with a later note on the message in the same thread, by any process."""
        return replace(
            self,
            header=self.header or later.header,
            sampled=later.sampled if self.sampled is None else self.sampled,
            finish=later.finish or self.finish,
            authors=_union(self.authors, later.authors),
            marked=self.marked or later.marked,
            is_thought=self.is_thought or later.is_thought,
            sources=_union(self.sources, later.sources),
            foreign=_union(self.foreign, later.foreign),
            thoughts=_union(self.thoughts, later.thoughts),
        )

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Note:
        """Return the note that `plain` wrote.

        Raises:
            DamagedRowError: It is not of that form.
        """
        try:
            return _NOTE.validate_python(plain)
        except ValueError as error:
            raise DamagedRowError(f"it is damaged: {error!r}") from error


_ROW, _NOTE = TypeAdapter(LineageRow), TypeAdapter(Note)


@dataclass
class ReadLog:
    """Everything that a thread has written."""

    rows: dict[str, LineageRow] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    """Merged notes by message id."""
    answers: dict[str, str] = field(default_factory=dict)
    """Ids of messages that answer calls, by idempotency key: the last answer counts."""
    damaged: str | None = None
    """Why an entry in it is rejected, if one is."""


class DescribedMessage(NamedTuple):
    """A message as it is written to a store."""

    row: LineageRow | None
    """Row of the message; None: the thread has written it already."""
    note: Note
    memos: tuple[str, ...] = ()
    """Idempotency keys of the thread's calls that it answers."""


class LineageExchange:
    """Export and import of the lineage of a tenant's messages: `engine.lineage`.

    Args:
        tenant: Tenant whose messages they are.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self.seals = tenant.message_ids.seals
        """Signs what the tenant gives out, and verifies what comes back."""

    @property
    def name(self) -> str:
        """Name of the tenant in a store; does not reveal the salt."""
        return self._tenant.name

    def unknown(self, handles: Iterable[MessageHandle], thread: Scope) -> list[MessageHandle]:
        """Return those handles of this engine's model that it does not know, or that the thread does not lease.
        Deliberately released ones count as known."""
        core, model = self._tenant.core, self._tenant.core.model.adapter.fingerprint
        with core.lock:
            self._tenant.require_open()
            return [handle for handle in handles if handle.base_model == model and self._is_unknown(handle, thread)]

    def recall(self, answered: Mapping[str, str], thread: Scope) -> list[str]:
        """Restore answers of the thread's calls, by idempotency key; return the ids of those that the thread does not
        lease."""
        table = self._tenant.core.table
        with self._tenant.core.lock:
            answers = [(memo, message_id, table.get(message_id)) for memo, message_id in answered.items()]
            for memo, _, message in answers:
                if message is not None and message.scoped[thread] and table.memos.get(memo) is not message:
                    table.remember(memo, message, thread)
            return [message_id for _, message_id, message in answers if message is None or not message.scoped[thread]]

    def described(
        self,
        handles: Iterable[MessageHandle],
        thread: Scope,
        noted: Mapping[str, Note],
        answered: Mapping[str, str],
        current_call: str | None,
    ) -> list[DescribedMessage]:
        """Return messages and all their ancestors as they are to be written for a thread, without what it has written
        already.

        Args:
            handles: Leased messages; others are skipped.
            thread: The thread's scope.
            noted: Notes that it has written, by message id.
            answered: Ids of the answers that it has written, by their calls' idempotency keys.
            current_call: The call made now, whose answer replaces an earlier one; for any other call another process
                may have written a newer answer since.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_open()
            leased = [core.table.get(message_id) for message_id in dict.fromkeys(handle.id for handle in handles)]
            waiting = [message for message in leased if message is not None and message.tenant == self._tenant.name]
            queued = {message.handle.id for message in waiting}
            described = list[DescribedMessage]()
            for message in waiting:
                before, own = noted.get(message.handle.id), message.handle.id
                note = _note(message, thread, before)
                note = note if before is None else before.merged(note)
                memos = tuple(
                    memo
                    for memo, scope in message.idempotency_keys.items()
                    if scope is thread
                    and (memo not in answered or (answered[memo] != own and memo.rpartition(" ")[0] == current_call))
                )
                if note == before and not memos:
                    continue
                row = row_of(message) if before is None else None
                described.append(DescribedMessage(row, note, memos))
                for source in _sources_of(message, thread):
                    if source.handle.id not in queued and source.handle.id not in noted:
                        queued.add(source.handle.id)
                        waiting.append(source)
            return described

    def import_messages(self, ids: Sequence[str], log: ReadLog, thread: Scope) -> dict[str, str]:
        """Import messages as if they had been computed here: KV is computed from their parents when it is read.

        Args:
            ids: Ids of the messages that the thread leases from now on.
            log: Everything that the thread has written.
            thread: The thread's scope.

        Returns:
            The reasons why some could not be imported, by id.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_open()
            taking = _Importer(self._tenant, log)
            for message_id in ids:
                taking.make(message_id)
            taking.apply_notes()
            if not thread.closed:
                for message_id in ids:
                    taking.lease(message_id, thread)
            return taking.refused

    def held_by_thread_alone(self, ids: Iterable[str], thread: Collection[Scope]) -> list[str]:
        """Return the ids of messages that are leased only by a thread, given its scopes, or by nobody."""
        table = self._tenant.core.table
        with self._tenant.core.lock:
            messages = ((message_id, table.get(message_id)) for message_id in ids)
            return [name for name, m in messages if m is None or m.leases == sum(m.scoped[s] for s in thread)]

    def look_for_kv(self, ids: Iterable[str]) -> None:
        """Look for files of these messages, also of other processes: their KV is read from there instead of computed.
        Slow."""
        if (persistent := self._tenant.persistent_kv) is not None:
            for message_id in ids:
                persistent.has(message_id)

    def _is_unknown(self, handle: MessageHandle, thread: Scope) -> bool:
        try:
            return not self._tenant.find(handle).scoped[thread]
        except UnknownHandleError:
            return True
        except HandleError:
            return False


class _Importer:
    """Import of one thread's messages. Used under the engine's lock."""

    def __init__(self, tenant: Tenant, log: ReadLog) -> None:
        self._tenant, self._table, self._log = tenant, tenant.core.table, log
        self._memos = defaultdict[str, list[str]](list)
        """Idempotency keys of the calls that each message answers."""
        for memo, message_id in log.answers.items():
            self._memos[message_id].append(memo)
        self.made: dict[str, Message] = {}
        """Messages by id, created now or known before."""
        self.refused: dict[str, str] = {}
        self._applied: set[str] = set()

    def make(self, message_id: str) -> None:
        """Create a message and its ancestors, parents first; iteratively, since a conversation may be long."""
        waiting = [message_id]
        while waiting:
            current = waiting[-1]
            row = self._log.rows.get(current)
            message = self._table.known(current)
            if current in self.made or current in self.refused:
                pass
            elif message is not None and message.tenant == self._tenant.name:
                self.made[current] = message
            elif row is None:
                self.refused[current] = "it is not in the store"
            elif above := [p for p, _ in row.parents if p not in self.made and p not in self.refused]:
                waiting += above
                continue
            else:
                self._make(row)
            waiting.pop()

    def _make(self, row: LineageRow) -> None:
        lost = next((parent for parent, _ in row.parents if parent in self.refused), None)
        if lost is not None:
            self.refused[row.id] = f"it comes of {lost}, and {self.refused[lost]}"
            return
        adapter, mapper = _split_encoder(row.model)
        parents = tuple(self.made[parent] for parent, _ in row.parents)
        placement = Placement(tuple(row.at + offset for _, offset in row.parents), row.at)
        lineage = Lineage(row.tokens, parents, placement, self._tenant.name, adapter, mapper)
        handle, loaded = self._tenant.message_ids.handle(lineage), self._tenant.core.adapters
        if handle.id != row.id or handle.model != row.model:
            self.refused[row.id] = "another model has made it, or another tenant"
        elif (adapter and adapter not in loaded.loras) or (mapper and mapper not in loaded.mappers):
            self.refused[row.id] = f"the adapter {adapter or mapper!r} that encoded it is not loaded"
        else:
            note = self._log.notes.get(row.id, Note(row.id))
            usage = note.usage or Usage.of_existing(0)
            message = Message(handle, lineage, note.author, note.role, usage, note.label, note.origin)
            message.forgotten = True  # until it is leased: callers that have its text may encode it again
            self._table.fill(message, None)
            self.made[row.id] = message

    def apply_notes(self) -> None:
        """Apply the thread's notes to all created messages, and to those that this creates in turn."""
        while waiting := [message_id for message_id in self.made if message_id not in self._applied]:
            for message_id in waiting:
                self._applied.add(message_id)
                self._apply_note(message_id)

    def _apply_note(self, message_id: str) -> None:
        message, note = self.made[message_id], self._log.notes.get(message_id)
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
            if (source_message := self.made.get(source)) is not None and source_message not in message.sources:
                message.sources.append(source_message)
        message.foreign += [foreign for foreign in note.foreign if foreign not in message.foreign]

    def lease(self, message_id: str, thread: Scope) -> None:
        """Lease a message for the thread, with its thoughts, and remember which calls it answers."""
        message, note = self.made.get(message_id), self._log.notes.get(message_id)
        if message is None:
            return
        with self._table.insert_transaction(message) as entered:
            if not entered.scoped[thread]:
                self._table.lease(entered, thread)
        for thought_id, call in note.thoughts if note is not None else ():
            self.make(thought_id)
            thought = self.made.get(thought_id)
            pairs = [(earlier.message, earlier.call) for earlier in message.thoughts]
            if thought is not None and (thought, call) not in pairs and len(pairs) < message.leases:
                self.apply_notes()
                self._table.lease(thought, thread)
                self._table.keep(message, Thought(thought, call, thread), thread)
                self._remember(thought, thread)
        self._remember(message, thread)

    def _remember(self, message: Message, thread: Scope) -> None:
        for memo in self._memos.get(message.handle.id, ()):
            if self._table.memos.get(memo) is not message and message.leases:
                self._table.remember(memo, message, thread)


def _sources_of(message: Message, thread: Scope) -> list[Message]:
    """Return a message's parents; also, as far as the thread leases them, its sources and thoughts."""
    thoughts = [thought.message for thought in message.thoughts if thought.scope is thread]
    return [*message.parents, *(source for source in message.sources if source.scoped[thread]), *thoughts]


def row_of(message: Message) -> LineageRow:
    """Return the row that describes a message."""
    key = kv_key(message)
    return LineageRow(key.id, key.model, key.tokens, key.parents, key.native_offset)


def _note(message: Message, thread: Scope, before: Note | None) -> Note:
    """Return a thread's note on a message now; it may hold less of other messages than when it wrote before."""
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
        tuple(source.handle.id for source in message.sources if source.scoped[thread]),
        tuple(message.foreign),
        tuple((thought.message.handle.id, thought.call) for thought in message.thoughts if thought.scope is thread),
    )


def _sampled(message: Message) -> int | tuple[SampledToken, ...] | None:
    chosen = message.chosen
    if chosen is None:
        return None
    behind = message.tokens[message.header : message.header + len(chosen)]
    return len(chosen) if chosen == tuple(map(SampledToken, behind)) else chosen


def _split_encoder(model: str) -> tuple[str, str]:
    """Split the fingerprint of a model with adapter and mapper; return those of adapter and mapper."""
    encoder, _, mapper = model.partition("~")
    return encoder.partition("+")[2], mapper


def _union(earlier: tuple[T, ...], later: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys([*earlier, *later]))


def _count_common(first: Sequence[tuple[str, int]], second: Sequence[tuple[str, int]]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
