"""A message's KV is brought into the pool for somebody outside of steps, from wherever it is, or computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from choreo_agents.engine.keeping.wanted import awaited, give_back
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.tenant import Tenant
from choreo_agents.engine.transfer.filling import no_room
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment


@contextmanager
def in_pool(tenant: Tenant, handle: MessageHandle) -> Iterator[tuple[KVPool, Segment]]:
    """A message's segment, wherever its KV was before; it stays in the pool for the block."""
    core = tenant.core
    with core.lock:
        message = tenant.find(handle)
        entry = core.table.want(message)
    try:
        while True:
            with core.lock:
                if message.entry is not entry:
                    entry = core.table.want(message)  # the engine has started again meanwhile
                there, pool = _brought(tenant, message, entry), core.pool
                if isinstance(there, Segment):
                    pool.borrow(there)
                    break
            there()
        try:
            yield pool, there
        finally:
            give_back(core, pool, there)
    finally:
        with core.lock:
            if message.entry is entry:
                core.table.unwant(message)


def _brought(tenant: Tenant, message: Message, entry: CacheEntry) -> Segment | Callable[[], object]:
    """A wanted message's segment, brought into the pool; or what to wait with before that can be."""
    core = tenant.core
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


def pin(tenant: Tenant, handle: MessageHandle, by: int) -> None:
    """Keep a message in the pool, once it is there, until it was unpinned as often."""
    with tenant.core.lock:
        message = tenant.find(handle)
        if tenant.core.method.keeps_kv:
            entry = tenant.core.table.entry(message)
            if entry.pins + by < 0:
                raise InvalidRequestError(f"handle {handle.id!r} was unpinned more often than pinned")
            entry.pins += by
