"""KV comes into the pool outside of steps: a message's own, from wherever it is, and what was encoded elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from choreo_agents.engine.calls import Prefill
from choreo_agents.engine.keeping.wanted import awaited, give_back, wanted_until
from choreo_agents.engine.messages.message import Lineage, Message
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.engine.pending import PlacedCall
from choreo_agents.engine.tenant import Tenant
from choreo_agents.errors import CapacityError, ContextLengthError, InvalidRequestError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
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
    table, call, handle = tenant.core.table, placed.read.call, tenant.naming.handle(lineage)
    assert isinstance(call, Prefill)
    known = table.get(handle.id)
    usage = Usage(0, 0, None, 0.0) if known is None else known.usage
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
    at = placement.new_offset if native_offset is None else native_offset
    most = tenant.core.model.adapter.max_positions
    if isinstance(at, bool) or not isinstance(at, int) or min(at, at + min(placement.relative(), default=0)) < 0:
        raise InvalidRequestError(f"native_offset {at!r} puts the message or a parent before position 0")
    lengths = [len(parent.tokens) for parent in lineage.parents]
    reach = placement.end(lengths, len(lineage.tokens)) - placement.new_offset + at
    if reach > most:
        raise ContextLengthError(f"the message was encoded up to position {reach}, the model's context ends at {most}")
    return at
