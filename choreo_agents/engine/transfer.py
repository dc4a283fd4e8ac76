"""Reading, pinning, offloading and persisting messages' KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.calls import Prefill
from choreo_agents.engine.introspection import MemoryMap, memory_map_of, tier_of
from choreo_agents.engine.messages.message import Scope
from choreo_agents.engine.persistent_kv import awaited, wanted_until
from choreo_agents.errors import CapacityError, EngineClosedError, HandleError, InvalidRequestError
from choreo_agents.kv.entry import CacheEntry, TierName
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.store import KVKey
from choreo_agents.kv.tiers import HostKV


@contextmanager
def in_pool(tenant: Tenant, handle: MessageHandle) -> Iterator[tuple[KVPool, Segment]]:
    """Bring a message's KV into the pool, and keep it there for the block."""
    core, message = tenant.core, tenant.find(handle)

    def brought(entry: CacheEntry) -> Segment | Callable[[], object]:
        tenant.require_open()
        waiting = awaited(core, message, entry)
        if waiting is not None:
            return waiting
        if entry.segment is None:
            core.method.evict(core.pool.rounded(entry.tokens))
            if not core.cache.restore(entry):
                raise CapacityError(
                    f"KV memory has room for {core.pool.free_tokens} of {entry.tokens} tokens now: release or unpin "
                    f"messages{core.method.pinned(tenant.name)}, or load the engine with a larger kv_budget_bytes"
                )
        assert entry.segment is not None
        return entry.segment

    with wanted_until(core, message, brought) as (pool, segment):
        assert isinstance(segment, Segment)
        yield pool, segment


T = TypeVar("T")


@dataclass
class Leases:
    """Leases that are dropped together, in any scope."""

    tenant: Tenant
    scope: Scope | None
    """Scope in which they were taken: if it has ended, they have ended with it."""
    handles: list[MessageHandle]

    def release(self) -> None:
        """Drop them; idempotent."""
        handles, self.handles = self.handles, []
        for handle in handles if self.scope is None or not self.scope.closed else ():
            with suppress(HandleError, EngineClosedError):
                self.tenant.release(handle, self.scope, keep_last=False)


class KVTransfer:
    """Keys and values themselves, and the tiers that they are in: `engine.kv`.

    Unless stated otherwise, every method raises `HandleError` if a handle is unknown, released, or another model's.
    """

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant

    def key(self, of: MessageHandle | Prefill) -> KVKey:
        """Return the key of a message's KV, as a store writes it with the KV.

        Args:
            of: The message, or the prefill that would make it: then nothing is encoded or leased, and its parents need
                not exist.

        Raises:
            InvalidRequestError: The prefill can never work, or is a mapped copy's.
        """
        tenant = self._tenant
        if isinstance(of, Prefill):
            with tenant.core.lock:
                tenant.require_open()
            return tenant.builder.key(of)
        with tenant.core.lock:
            return tenant.find(of).kv_key()

    def read(self, handle: MessageHandle) -> HostKV:
        """Return a copy of a message's keys and values, [layers, kv_heads, tokens, head_dim] each, on the host.

        If they are not in the pool, they are brought there first.

        Raises:
            InvalidRequestError: The engine's method keeps no KV.
            CapacityError: Pinned and running messages leave no memory for it now.
        """
        if not self._tenant.core.method.keeps_kv:
            method = self._tenant.core.settings.method
            raise InvalidRequestError(f"an engine with method {method!r} has no KV to read")
        with in_pool(self._tenant, handle) as (pool, segment):
            return pool.read(segment)

    def prefetch(self, handles: Sequence[MessageHandle]) -> None:
        """Bring messages into the pool, or compute them again, before they are read.

        Raises:
            CapacityError: Pinned and running messages leave no memory for one of them now.
        """
        for handle in handles if self._tenant.core.method.keeps_kv else ():
            with in_pool(self._tenant, handle):
                pass

    def lease(self, handles: Sequence[MessageHandle], *, scoped: bool = True) -> Leases:
        """Take one more lease of each message, or none if one of them raises.

        Args:
            handles: Messages to lease.
            scoped: Whether the end of the scope drops them, too; else they last until they are released.
        """
        scope, tenant = self._tenant.scope() if scoped else None, self._tenant
        with tenant.core.lock:
            messages = [tenant.find(handle) for handle in handles]
            for message in messages if scope is None or not scope.closed else ():
                tenant.core.table.lease(message, scope)
        return Leases(tenant, scope, list(handles))

    def tiers(self, handles: Sequence[MessageHandle]) -> list[TierName | None]:
        """Return the fastest tier of each message's KV: `"lineage"` if none has it, None if it is not known and leased.

        Works on a closed engine, too.
        """
        core = self._tenant.core
        with core.lock:
            self._tenant.require_tenancy()
            tiers: list[TierName | None] = []
            for handle in handles:
                try:
                    tiers.append(tier_of(core, self._tenant.find(handle)))
                except HandleError:
                    tiers.append(None)
            return tiers

    def offload(self, what: Scope | Sequence[MessageHandle] | None = None) -> None:
        """Free the pool's memory for now: of messages, of what only a scope leases, or of everything.

        KV that is being read or pinned stays. The rest goes to the host or the disk, or is dropped and computed again,
        and comes back when it is next read: handles stay valid.
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
        """Keep a message in the pool, however little memory that leaves; `unpin` undoes it.

        Raises:
            HandleError: The message does not exist, or is another tenant's.
            CapacityError: Pinned messages leave no memory for it.
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
                self._tenant.core.cache.pin(entry, entry.pins + by)

    def persist(self, handles: Sequence[MessageHandle]) -> None:
        """Write the KV of messages to `Memory(persist_dir=...)`, in the background: it outlives the engine.

        Lost KV is read from there, bit by bit the same, by this engine and by others of the same model and salt.
        Nothing happens without such a folder, or for a message that has a file, has no KV, is a mapped copy, or is
        larger than the budget. `flush` raises errors of writes, and a `CacheWriteFailed` event reports them once.

        Raises:
            InvalidRequestError: The tenant has no salt, which seals what outlives the engine.
        """
        if self._tenant.persistent_kv is not None:
            self._tenant.persistent_kv.persist(handles)

    def persisted(self, handles: Sequence[MessageHandle]) -> list[bool]:
        """Return whether messages, known here or not, have files of `persist`, perhaps of other processes. Looks at the
        disk.

        Raises:
            InvalidRequestError: There is such a folder, but the tenant has no salt.
        """
        persistent_kv = self._tenant.persistent_kv
        store = None if persistent_kv is None else persistent_kv.require_store()
        return [store is not None and store.has(handle.id) for handle in handles]

    def unpersist(self, messages: Sequence[MessageHandle | str]) -> None:
        """Remove files that `persist` has written, or is to write, and return when they are gone.

        Args:
            messages: Handles or their ids, known here or not. KV in memory stays.

        Raises:
            OSError: A file still exists; `flush` tells why.
        """
        if self._tenant.persistent_kv is not None:
            ids = [m.id if isinstance(m, MessageHandle) else m for m in messages]
            self._tenant.persistent_kv.unpersist(ids)
            self._tenant.persistent_kv.wait()
            self._tenant.persistent_kv.require_gone(ids)

    def flush(self) -> None:
        """Wait until everything to be persisted is written; closing does so, too, but reports no errors.

        Raises:
            OSError: A file could not be written.
        """
        self._tenant.core.lock.require_own()
        if self._tenant.persistent_kv is not None:
            self._tenant.persistent_kv.flush()

    def memory_map(self) -> MemoryMap:
        """Return how much is in each tier, and which of the tenant's authors keep it there."""
        self._tenant.require_tenancy()
        return memory_map_of(self._tenant.core, self._tenant.name)

    def get_or_create(self, make: Callable[..., T], *args: Any) -> T:
        """Return an object that keeps messages for this tenant: made once, and returned again while the tenancy lasts.

        Args:
            make: A function or class, called under the engine's lock; the same one returns the same object.
            args: Its arguments.
        """
        with self._tenant.core.lock:
            self._tenant.require_tenancy()
            keepers = self._tenant.keepers
            if make not in keepers:
                keepers[make] = make(*args)
            return cast(T, keepers[make])
