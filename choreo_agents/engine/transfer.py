"""KV out of the engine and into it: what one process has encoded serves another that runs the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.calls import Prefill
from choreo_agents.engine.introspection import MemoryMap, memory_map_of, tier_of
from choreo_agents.engine.messages.message import Lineage, Message, Scope, Usage
from choreo_agents.engine.messages.table import require_handle
from choreo_agents.engine.persistent_kv import (
    WITHOUT_SALT,
    PersistentKV,
    awaited,
    give_back,
    kv_key,
    lasting_store,
    wanted_until,
)
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.errors import CapacityError, ContextLengthError, EngineClosedError, HandleError, InvalidRequestError
from choreo_agents.kv.entry import CacheEntry, TierName
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store import KVKey, KVStore
from choreo_agents.kv.tiers import HostKV, shapes_of


@contextmanager
def in_pool(tenant: Tenant, handle: MessageHandle) -> Iterator[tuple[KVPool, Segment]]:
    """A message's segment, wherever its KV was before; it stays in the pool for the block."""
    core, message = tenant.core, tenant.find(handle)

    def brought(entry: CacheEntry) -> Segment | Callable[[], object]:
        tenant.require_open()
        waiting = awaited(core, message, entry)
        if waiting is not None:
            return waiting
        if entry.segment is None:
            core.method.evict(core.pool.rounded(entry.tokens))
            if not core.cache.restore(entry):
                raise no_room(tenant, entry.tokens)
        assert entry.segment is not None
        return entry.segment

    with wanted_until(core, message, brought) as (pool, segment):
        assert isinstance(segment, Segment)
        yield pool, segment


def no_room(tenant: Tenant, tokens: int) -> CapacityError:
    """Why so many tokens cannot be brought into the pool."""
    pool = tenant.core.pool
    return CapacityError(
        f"KV memory has room for {pool.free_tokens} of {tokens} tokens now: release or unpin messages"
        f"{tenant.core.method.pinned(tenant.name)}, or load the engine with a larger kv_budget_bytes"
    )


def allocated(tenant: Tenant, tokens: int, at: int) -> Segment:
    """Room in the pool, borrowed until it is `filled`; raises `CapacityError` if there is none now."""
    core = tenant.core
    core.method.evict(core.pool.rounded(tokens))
    segment = core.pool.allocate(tokens, at, tenant.name)
    if segment is None:
        raise no_room(tenant, tokens)
    core.pool.borrow(segment)
    return segment


@contextmanager
def filled(tenant: Tenant, pool: KVPool, segment: Segment, kv: HostKV) -> Iterator[None]:
    """Copy KV into a borrowed segment, and give that back after a block that takes over its pin, under the lock.

    The engine's lock is not held before: no step knows the segment yet, so steps go on meanwhile.
    """
    core = tenant.core
    try:
        try:
            pool.write(segment, kv)
        except BaseException:
            with core.lock:
                pool.unpin(segment)
            raise
        with core.lock:
            yield
    finally:
        give_back(core, pool, segment)


def adopted_message(tenant: Tenant, placed: PlacedCall, lineage: Lineage) -> Message:
    """The message that an adopted prefill makes."""
    table, call, handle = tenant.core.table, placed.read.call, tenant.message_ids.handle(lineage)
    assert isinstance(call, Prefill)
    known = table.get(handle.id)
    usage = Usage.of_existing(0) if known is None else known.usage
    label = lineage.label(call.author, call.role)
    return Message(handle, lineage, call.author, call.role, usage, label, origin=label)


def require_shapes(tenant: Tenant, kv: HostKV, tokens: int) -> None:
    """Raise unless KV is of so many tokens of the engine's model."""
    wanted = shapes_of(tenant.core.model.adapter.geometry, tokens)
    if not isinstance(kv, HostKV) or kv.shapes() != wanted:
        found = kv.shapes() if isinstance(kv, HostKV) else kv
        raise InvalidRequestError(f"the kv is not of {tokens} tokens of this model: {found!r}, not {wanted!r}")


def require_native(tenant: Tenant, lineage: Lineage, native_offset: int | None) -> int:
    """Where KV was encoded; raises if it or what it attends to could not have stood there."""
    placement = lineage.placement
    at = placement.position if native_offset is None else native_offset
    most = tenant.core.model.adapter.max_positions
    if isinstance(at, bool) or not isinstance(at, int) or min(at, at + min(placement.relative(), default=0)) < 0:
        raise InvalidRequestError(f"native_offset {at!r} puts the message or a parent before position 0")
    lengths = [len(parent.tokens) for parent in lineage.parents]
    reach = placement.end(lengths, len(lineage.tokens)) - placement.position + at
    if reach > most:
        raise ContextLengthError(f"the message was encoded up to position {reach}, the model's context ends at {most}")
    return at


T = TypeVar("T")


@dataclass
class Leases:
    """Leases that are dropped together, in whichever scope that happens."""

    tenant: Tenant
    scope: Scope | None
    """In which they were taken: if it has ended, they have ended with it."""
    handles: list[MessageHandle]

    def add(self, handles: Sequence[MessageHandle]) -> None:
        """Take over leases that came with handles, from calls of the same scope."""
        self.handles.extend(handles)

    def release(self) -> None:
        """Drop them; once."""
        handles, self.handles = self.handles, []
        for handle in handles if self.scope is None or not self.scope.closed else ():
            with suppress(HandleError, EngineClosedError):
                self.tenant.release(handle, self.scope, keep_last=False)


class KVTransfer:
    """Keys and values themselves, for those who keep them elsewhere or move them about: `engine.kv`.

    Unless it says otherwise, every method raises `HandleError` if a handle is unknown, released, or another model's.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def key(self, of: MessageHandle | Prefill) -> KVKey:
        """What names a message's KV, as a store writes it beside the KV.

        Args:
            of: The message, or the prefill that would make it: then nothing is encoded or leased, and its parents are
                named without asking whether the engine has them.

        Raises:
            InvalidRequestError: The prefill can never work, or is a mapped copy's.
        """
        tenant = self._tenant
        if isinstance(of, Prefill):
            with tenant.core.lock:
                tenant.require_open()
            return tenant.builder.key(of)
        with tenant.core.lock:
            return kv_key(tenant.find(of))

    def read(self, handle: MessageHandle) -> HostKV:
        """A copy of a message's keys and values, [layers, kv_heads, tokens, head_dim] each, on the host.

        It is brought into the KV memory for it, if it is not there.

        Raises:
            InvalidRequestError: The engine's method keeps no KV.
            CapacityError: Pinned and running messages leave no room for it now.
        """
        if not self._tenant.core.method.keeps_kv:
            method = self._tenant.core.settings.method
            raise InvalidRequestError(f"an engine of method {method!r} keeps no KV to read")
        with in_pool(self._tenant, handle) as (pool, segment):
            return pool.read(segment)

    def prefetch(self, handles: Sequence[MessageHandle]) -> None:
        """Bring messages into the KV memory, or compute them again, before they are read.

        Raises:
            CapacityError: Pinned and running messages leave no room for one of them now.
        """
        for handle in handles if self._tenant.core.method.keeps_kv else ():
            with in_pool(self._tenant, handle):
                pass

    def import_kv(self, call: Prefill, kv: HostKV, native_offset: int | None = None) -> MessageHandle:
        """Take in KV that was encoded elsewhere, in place of a prefill: nothing is encoded.

        The message is as if it had been prefilled here: found again by its content, and computed again from its
        lineage if its KV is lost. If the engine has its KV already, that serves.

        Args:
            call: The prefill that made it.
            kv: Its keys and values, as `read` gives them.
            native_offset: The position that its first token was encoded at; None: where the call places it.

        Returns:
            A leased handle.

        Raises:
            InvalidRequestError: The call can never work, or the kv is not of this model's shapes and type.
            CapacityError: Pinned and running messages leave no room for it now.
        """
        if not isinstance(call, Prefill):
            raise InvalidRequestError(f"only a Prefill can be adopted, not {call!r}")
        tenant, core, scope = self._tenant, self._tenant.core, self._tenant.scope()
        [read] = tenant.builder.read(call)
        with core.lock:
            tenant.require_open()
            placed = tenant.builder.place(read)
            if placed.lineage.mapper:
                raise InvalidRequestError("a cache mapper's copy is made of its source: it is not adopted")
            require_shapes(tenant, kv, len(read.tokens))
            lineage = placed.lineage.at(require_native(tenant, placed.lineage, native_offset))
            known, pool = core.table.get(tenant.message_ids.handle(lineage).id), core.pool
            if known is not None and known.entry is not None and not core.cache.lost(known.entry):
                return tenant.answered(known, placed, scope).result()
            if not core.method.keeps_kv:
                return tenant.answered(adopted_message(tenant, placed, lineage), placed, scope).result()
            segment = allocated(tenant, len(lineage.tokens), lineage.placement.position)
        with filled(tenant, pool, segment, kv):
            if tenant.closed:
                pool.unpin(segment)
                tenant.require_open()
            # If the engine has started again meanwhile, its memory is empty: lineage is left.
            taken = segment if core.pool is pool else None
            answer = tenant.answered(adopted_message(tenant, placed, lineage), placed, scope, taken)
            core.tier_counters.add(tenant.name, "adopted")
            return answer.result()

    def lease(self, handles: Sequence[MessageHandle], *, scoped: bool = True) -> Leases:
        """Take one more lease of each message, or none if one of them raises.

        Args:
            handles: What to lease.
            scoped: Whether the end of the scope drops them, too; else they last until they are released.
        """
        scope, tenant = self._tenant.scope() if scoped else None, self._tenant
        with tenant.core.lock:
            found = [tenant.find(handle) for handle in handles]
            for message in found if scope is None or not scope.closed else ():
                tenant.core.table.lease(message, scope)
        return Leases(tenant, scope, list(handles))

    def tiers(self, handles: Sequence[MessageHandle]) -> list[TierName | None]:
        """The fastest tier that has each message's KV: `"lineage"` if none has, None if it is not known and leased.

        Of a closed engine, too.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_tenancy()
            found = [core.table.get(require_handle(handle).id) for handle in handles]
            mine = [
                m if m and (m.handle, m.tenant) == (h, self._tenant.name) else None
                for m, h in zip(found, handles, strict=True)
            ]
            return [None if message is None else tier_of(message, core.cache) for message in mine]

    def offload(self, what: Scope | Sequence[MessageHandle] | None = None) -> None:
        """Give the pool's memory back for now: of messages, of what only a scope leases, or of everything.

        What is being read or pinned stays. The rest goes to the host or the disk, or is forgotten and computed again,
        and comes back when it is next read: handles stay good.
        """
        tenant, core = self._tenant, self._tenant.core
        with core.lock:
            tenant.require_tenancy()
            if what is None or isinstance(what, Scope):
                parked = [m for m in core.table.messages(tenant.name) if what is None or m.leased_only_within(what)]
            else:
                parked = [tenant.find(handle) for handle in what]
            core.cache.offload(m.entry for m in parked if m.entry is not None)

    def pin(self, handle: MessageHandle) -> None:
        """Keep a message in the pool, however little room that leaves; `unpin` takes it back.

        Raises:
            HandleError: The message is not there, or another tenant's.
            CapacityError: Pinned messages leave no room for it.
        """
        self._pin(handle, 1)

    def unpin(self, handle: MessageHandle) -> None:
        """Undo one `pin`."""
        self._pin(handle, -1)

    def _pin(self, handle: MessageHandle, by: int) -> None:
        with self._tenant.core.lock:
            message = self._tenant.find(handle)
            if self._tenant.core.method.keeps_kv:
                entry = self._tenant.core.table.entry(message)
                if entry.pins + by < 0:
                    raise InvalidRequestError(f"handle {handle.id!r} was unpinned more often than pinned")
                entry.pins += by

    def store(self, folder: str | Path, budget_bytes: int = 1 << 34) -> KVStore:
        """KV of this model and tenant in a folder that outlives the engine and may be shared between processes.

        Args:
            folder: Has a folder for each model in it, and in that one for each tenant.
            budget_bytes: Of this model's and tenant's files; the longest unused ones are removed.

        Raises:
            InvalidRequestError: The tenant has no salt: what outlives the engine is sealed from it. Or the folder is
                another user's.
        """
        tenant, core = self._tenant, self._tenant.core
        if not tenant.message_ids.salted:
            raise InvalidRequestError(WITHOUT_SALT)
        with core.lock:
            tenant.require_open()
        store, place = lasting_store(core, tenant.message_ids, Path(folder), budget_bytes, core.tell_skipped_file)
        place.make()
        return store

    def persistent_kv(self, store: KVStore | None) -> PersistentKV:
        """What writes the tenant's messages to a store, or nowhere, in the background; close it before the engine."""
        return PersistentKV(self._tenant.core, self._tenant.find, store)

    def persist(self, handles: Sequence[MessageHandle]) -> None:
        """Have the KV of messages written to `Memory(persist_dir=...)`, in the background: it outlives the engine.

        What is lost is read from there, bit by bit the same, by this engine and by others of the same model and salt.
        Nothing happens without such a folder, or for what has a file, has no KV, is a mapped copy, or is larger than
        the budget. `flush` tells what could not be written, as does a `CacheWriteFailed` event, once.

        Raises:
            InvalidRequestError: The tenant has no salt: what outlives the engine is sealed from it.
        """
        if self._tenant.persistent_kv is not None:
            self._tenant.persistent_kv.persist(handles)

    def unpersist(self, messages: Sequence[MessageHandle | str]) -> None:
        """Remove files that `keep` has written, or is to write, and return when they are gone.

        Args:
            messages: Handles or their ids, known here or not. What memory has of them stays.

        Raises:
            OSError: One is there still; `flush` tells why.
        """
        if self._tenant.persistent_kv is not None:
            gone = [each.id if isinstance(each, MessageHandle) else each for each in messages]
            self._tenant.persistent_kv.unpersist(gone)
            self._tenant.persistent_kv.wait()
            self._tenant.persistent_kv.require_gone(gone)

    def flush(self) -> None:
        """Return when all that was to be kept is written; closing does so, too, and tells nobody.

        Raises:
            OSError: Something could not be.
        """
        self._tenant.core.lock.require_own()
        if self._tenant.persistent_kv is not None:
            self._tenant.persistent_kv.flush()

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which of the tenant's authors keep it there."""
        self._tenant.require_tenancy()
        return memory_map_of(self._tenant.core, self._tenant.name)

    def get_or_create(self, make: Callable[..., T], *args: Any) -> T:
        """What keeps messages for this tenant: made once, and found again for as long as the tenancy lasts.

        Args:
            make: A function or class; the same one finds the same again. Called under the engine's lock.
            args: What it is called with.
        """
        return self._tenant.keeper(make, *args)
