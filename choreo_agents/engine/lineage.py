"""Lineage of messages for a store: export it, and import it into an engine that has never computed them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.kv_packets import KVPacket, export_kv, import_kv
from choreo_agents.engine.messages.message import (
    Lineage,
    Message,
    Placement,
    Scope,
    Thought,
    Usage,
    parents_first,
)
from choreo_agents.errors import HandleError, UnknownHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey
from choreo_agents.runtime.request import FinishReason
from choreo_agents.sampling import SampledToken


@dataclass(frozen=True)
class LoggedMessage:
    """A thread's record of a message: what its KV is computed from, what is known of it, and which calls it answers."""

    id: str
    key: KVKey | None = None
    """What its KV is computed from, the same for every author and engine; None: an earlier record says it."""
    answers: tuple[str, ...] = ()
    """Idempotency keys of the thread's calls that it answers, as far as no earlier record says it."""
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

    def merged(self, later: LoggedMessage) -> LoggedMessage:
        """Return it merged with a later record of the message in the same thread, by any process."""
        changes: dict[str, Any] = {
            name: tuple(dict.fromkeys([*getattr(self, name), *getattr(later, name)]))
            for name in ("authors", "sources", "foreign", "thoughts")
        }
        changes |= {name: getattr(self, name) or getattr(later, name) for name in ("header", "marked", "is_thought")}
        sampled = later.sampled if self.sampled is None else self.sampled
        return replace(self, **changes, sampled=sampled, finish=later.finish or self.finish)


@dataclass
class ReadLog:
    """Everything that a thread has written."""

    keys: dict[str, KVKey] = field(default_factory=dict)
    """What messages are computed from, by id."""
    messages: dict[str, LoggedMessage] = field(default_factory=dict)
    """Merged records by message id, without keys and answers."""
    answers: dict[str, str] = field(default_factory=dict)
    """Ids of messages that answer calls, by idempotency key: the last answer counts."""
    damaged: str | None = None
    """Why an entry in it is rejected, if one is."""

    def add(self, record: LoggedMessage) -> None:
        """Merge a record, which is later than all others."""
        if record.key is not None:
            self.keys[record.id] = record.key
        self.answers.update(dict.fromkeys(record.answers, record.id))
        known, record = self.messages.get(record.id), replace(record, key=None, answers=())
        self.messages[record.id] = record if known is None else known.merged(record)

    def parents(self, message_id: str) -> list[str]:
        """Return the ids of a message's parents; none, if they are not in the log."""
        key = self.keys.get(message_id)
        return [] if key is None else [parent for parent, _ in key.parents]


@dataclass(frozen=True)
class Promised:
    """A message that nobody has encoded yet."""

    again: bool
    """Whether its text was encoded before and is lost."""
    foreign: tuple[MessageHandle, ...] = ()
    """Messages of other models that have the same text."""


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
        self, handles: Iterable[MessageHandle], thread: Scope, log: ReadLog, current_call: str | None
    ) -> list[LoggedMessage]:
        """Return records of messages and all their ancestors for a thread, without what it has written already.

        Args:
            handles: Leased messages; others are skipped.
            thread: The thread's scope.
            log: Everything that it has written.
            current_call: The call made now, whose answer replaces an earlier one; for any other call another process
                may have written a newer answer since.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_open()
            leased = [core.table.get(message_id) for message_id in dict.fromkeys(handle.id for handle in handles)]
            waiting = [message for message in leased if message is not None and message.tenant == self._tenant.name]
            queued = {message.handle.id for message in waiting}
            described = list[LoggedMessage]()
            for message in waiting:
                before, own = log.messages.get(message.handle.id), message.handle.id
                record = _record(message, thread, before)
                record = record if before is None else before.merged(record)
                answers = tuple(
                    call
                    for call, scope in message.idempotency_keys.items()
                    if scope is thread
                    and (
                        call not in log.answers
                        or (log.answers[call] != own and call.rpartition(" ")[0] == current_call)
                    )
                )
                if record == before and not answers:
                    continue
                key = message.kv_key() if before is None else None
                described.append(replace(record, key=key, answers=answers))
                for source in _sources_of(message, thread):
                    if source.handle.id not in queued and source.handle.id not in log.messages:
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
        with self._tenant.core.lock:
            self._tenant.require_open()
            importer = _Importer(self._tenant, log)
            for message_id in dict.fromkeys([*ids, *log.keys, *log.messages]):
                importer.make(message_id)
            for message_id in [*importer.made]:
                importer.apply(message_id)
            if not thread.closed:
                for message_id in ids:
                    importer.lease(message_id, thread)
            return {message_id: importer.refused[message_id] for message_id in ids if message_id in importer.refused}

    def import_rows(
        self, ids: Sequence[str], rows: Collection[KVKey], promised: Mapping[str, Promised], scope: Scope
    ) -> None:
        """Import messages with the lineage that another engine sent, and lease them.

        Args:
            ids: Ids of the messages that the scope leases, if rows say what they are computed from.
            rows: Lineage of these and of their ancestors, as far as it may be unknown here.
            promised: Those of the messages that nobody has encoded yet, by id.
            scope: The scope.

        Raises:
            UnknownHandleError: Some could not be imported.
        """
        core, keys = self._tenant.core, {row.id: row for row in rows}
        with core.lock:
            new = [message_id for message_id in keys if core.table.known(message_id) is None]
            refused = self.import_messages([key for key in ids if key in keys], ReadLog(keys), scope)
            for message_id in new:
                message, promise = core.table.known(message_id), promised.get(message_id)
                if message is not None and promise is not None:
                    message.promise, message.again = core.next_number(), promise.again
                    message.foreign.extend(promise.foreign)
        if refused:
            raise UnknownHandleError("; ".join(f"{name}: {why}" for name, why in refused.items()))

    def export_packets(self, ids: Sequence[str]) -> list[KVPacket]:
        """Copy the KV of messages, by their ids, for another engine: see `kv_packets.export_kv`."""
        return export_kv(self._tenant, ids)

    def import_packets(self, packets: Sequence[KVPacket]) -> dict[str, str]:
        """Give known messages the KV that another engine exported: see `kv_packets.import_kv`."""
        return import_kv(self._tenant, packets)

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
        self._answered = defaultdict[str, list[str]](list)
        """Idempotency keys of the calls that each message answers."""
        for call, message_id in log.answers.items():
            self._answered[message_id].append(call)
        self.made: dict[str, Message] = {}
        """Messages by id, created now or known before."""
        self.refused: dict[str, str] = {}

    def make(self, message_id: str) -> None:
        """Create a message and its ancestors, parents first."""
        for current in parents_first(message_id, self._log.parents, self._is_settled):
            self._make(current)

    def _is_settled(self, message_id: str) -> bool:
        if message_id in self.made or message_id in self.refused:
            return True
        known = self._table.known(message_id)
        if known is None or known.tenant != self._tenant.name:
            return False
        self.made[message_id] = known
        return True

    def _make(self, message_id: str) -> None:
        key, record = self._log.keys.get(message_id), self._log.messages.get(message_id, LoggedMessage(message_id))
        if key is None:
            self.refused[message_id] = "it is not in the store"
            return
        lost = next((parent for parent, _ in key.parents if parent in self.refused), None)
        if lost is not None:
            self.refused[message_id] = f"its ancestor {lost} cannot be restored: {self.refused[lost]}"
            return
        encoder, _, mapper = key.model.partition("~")
        adapter = encoder.partition("+")[2]
        parents = tuple(self.made[parent] for parent, _ in key.parents)
        placement = Placement(tuple(key.native_offset + offset for _, offset in key.parents), key.native_offset)
        lineage = Lineage(key.tokens, parents, placement, self._tenant.name, adapter, mapper)
        handle, loaded = self._tenant.message_ids.handle(lineage), self._tenant.core.adapters
        if handle.id != message_id or handle.model != key.model:
            self.refused[message_id] = "another model or tenant created it"
        elif (adapter and adapter not in loaded.loras) or (mapper and mapper not in loaded.mappers):
            self.refused[message_id] = f"it was encoded with the adapter {adapter or mapper!r}, which is not loaded"
        else:
            usage = record.usage or Usage.of_existing(0)
            message = Message(handle, lineage, record.author, record.role, usage, record.label, record.origin)
            message.forgotten = True  # until it is leased: callers that have its text may encode it again
            self._table.fill(message, None)
            self.made[message_id] = message

    def apply(self, message_id: str) -> None:
        """Apply the thread's record of a message to it."""
        message, record = self.made[message_id], self._log.messages.get(message_id)
        if record is None:
            return
        message.authors |= {*record.authors}
        message.marked, message.is_thought = message.marked or record.marked, message.is_thought or record.is_thought
        message.header = message.header or record.header
        if record.sampled is not None and message.chosen is None:
            behind, sampled = message.tokens[record.header :], record.sampled
            message.chosen = tuple(map(SampledToken, behind[:sampled])) if isinstance(sampled, int) else sampled
        message.finish_reason = message.finish_reason or record.finish
        for source_id in record.sources:
            self.make(source_id)
            source = self.made.get(source_id)
            if source is not None and source not in message.sources:
                message.sources.append(source)
        message.foreign += [foreign for foreign in record.foreign if foreign not in message.foreign]

    def lease(self, message_id: str, thread: Scope) -> None:
        """Lease a message for the thread, with its thoughts, and remember which calls it answers."""
        message, record = self.made.get(message_id), self._log.messages.get(message_id)
        if message is None:
            return
        with self._table.insert_transaction(message) as entered:
            if not entered.scoped[thread]:
                self._table.lease(entered, thread)
        for thought_id, call in () if record is None else record.thoughts:
            self.make(thought_id)  # the engine may know thoughts that are lost from the log
            thought = self.made.get(thought_id)
            pairs = [(earlier.message, earlier.call) for earlier in message.thoughts]
            if thought is not None and (thought, call) not in pairs and len(pairs) < message.leases:
                self._table.lease(thought, thread)
                self._table.keep(message, Thought(thought, call, thread), thread)
                self._remember(thought, thread)
        self._remember(message, thread)

    def _remember(self, message: Message, thread: Scope) -> None:
        for call in self._answered.get(message.handle.id, ()):
            if self._table.memos.get(call) is not message and message.leases:
                self._table.remember(call, message, thread)


def _sources_of(message: Message, thread: Scope) -> list[Message]:
    """Return a message's parents; also, as far as the thread leases them, its sources and thoughts."""
    thoughts = [thought.message for thought in message.thoughts if thought.scope is thread]
    return [*message.parents, *(source for source in message.sources if source.scoped[thread]), *thoughts]


def _record(message: Message, thread: Scope, before: LoggedMessage | None) -> LoggedMessage:
    """Return a thread's record of a message now; it may hold less of other messages than when it wrote before."""
    return LoggedMessage(
        message.handle.id,
        author=message.author,
        role=message.role,
        label=message.label,
        origin=message.origin,
        header=message.header,
        sampled=_sampled(message) if before is None or before.sampled is None else None,
        finish=message.finish_reason,
        usage=message.usage,
        authors=tuple(sorted(message.authors)),
        marked=message.marked,
        is_thought=message.is_thought,
        sources=tuple(source.handle.id for source in message.sources if source.scoped[thread]),
        foreign=tuple(message.foreign),
        thoughts=tuple((item.message.handle.id, item.call) for item in message.thoughts if item.scope is thread),
    )


def _sampled(message: Message) -> int | tuple[SampledToken, ...] | None:
    chosen = message.chosen
    if chosen is None:
        return None
    behind = message.tokens[message.header : message.header + len(chosen)]
    return len(chosen) if chosen == tuple(map(SampledToken, behind)) else chosen
