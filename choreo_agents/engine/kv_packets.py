"""Packets of KV, which copy messages between two engines bit by bit.

The lineage of a message is sent ahead: if its KV is lost on the way, or refused, it is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from choreo_agents.engine.calling import Tenant
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.persistent_kv import copied, filled
from choreo_agents.errors import ChoreoError
from choreo_agents.kv.entry import CacheEntry
from choreo_agents.kv.store import KVKey
from choreo_agents.kv.store.format import UnusableFileError, in_bytes, most_bytes, opened, parsed, sealed
from choreo_agents.kv.tiers import HostKV

_NO_ROOM = "neither the pool nor the host has memory for it now"
_STARTED_AGAIN = "the engine was restarted meanwhile: send it again"


@dataclass(frozen=True)
class KVPacket:
    """A message's keys and values on their way between two engines, under the tenant's seal.

    Anyone who has it can read it; only a holder of the tenant's key can make one that is accepted.
    """

    id: str
    """Id of the message."""
    nbytes: int
    """Bytes of keys and values, in the format that is used outside the pool."""
    data: bytes
    """Content that a file of the tenant would have."""


def export_kv(tenant: Tenant, ids: Sequence[str]) -> list[KVPacket]:
    """Copy the KV of messages from the pool, the host, files, or calls under way that read them.

    Steps go on meanwhile, and nothing is computed for this alone. Slow; from any thread but the engine's.

    Args:
        tenant: Tenant that the messages belong to.
        ids: Ids of the messages. Those without available KV are left out.

    Raises:
        EngineClosedError: The engine or the tenancy was closed.
    """
    core, seal, packets = tenant.core, tenant.message_ids.seal, list[KVPacket]()
    for message_id in dict.fromkeys(ids):
        with core.lock:
            message = core.table.known(message_id)
        if message is None or message.tenant != tenant.name:
            continue
        host_copy: tuple[KVKey, HostKV] | None = None
        with suppress(ChoreoError):  # the call that computed it has failed, or the engine has restarted
            host_copy = copied(core, message, lost_too=False)
        if host_copy is not None:
            key, kv = host_copy
            packets.append(KVPacket(key.id, kv.nbytes, in_bytes(sealed(key, kv, seal))))
    with core.lock:
        tenant.require_open()
        core.tier_counters.add(tenant.name, "sent_bytes", sum(packet.nbytes for packet in packets))
    return packets


def import_kv(tenant: Tenant, packets: Sequence[KVPacket]) -> dict[str, str]:
    """Give messages the KV that was sent for them; one that has its KV keeps that.

    Messages that no call waits for may be evicted for it. Steps go on meanwhile. Slow; from any thread but the
    engine's.

    Args:
        tenant: Tenant that the messages belong to.
        packets: Packets of messages whose lineage is known here (see `LineageExchange.import_messages`) and that
            somebody leases, or waits for. Nothing about these changes but that they have KV.

    Returns:
        Reasons of refusal by message id: these messages are as they were before.

    Raises:
        EngineClosedError: The engine or the tenancy was closed, or started again meanwhile.
    """
    core, unpacking = tenant.core, _Import(tenant)
    try:
        answers = [(packet.id, unpacking.take(packet)) for packet in packets]
    finally:
        with core.lock:
            lost = unpacking.close()
    return dict.fromkeys(lost, _NO_ROOM) | {message_id: why for message_id, why in answers if why is not None}


class _Import:
    """Import of packets that come together. Wants their messages, so that none is evicted for a later one."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant, self._core = tenant, tenant.core
        self._wanted: list[tuple[CacheEntry, Message]] = []

    def take(self, packet: KVPacket) -> str | None:
        """Import a packet; return why it is refused, or None if its message has KV."""
        with self._core.lock:
            self._tenant.require_open()
            message = self._core.table.known(packet.id)
            if message is None or message.tenant != self._tenant.name:
                return "it is unknown here: send its parents first"
            if not self._core.method.keeps_kv:
                return f"an engine with method {self._core.settings.method!r} has no KV"
            if not message.leases and (message.entry is None or not message.entry.wanted):
                return "no call here leases it, or waits for it"
            entry = self._core.table.want(message)
            self._wanted.append((entry, message))
            if not self._core.cache.lost(entry):
                return None
            key = message.kv_key()
        try:
            kv = self._open(packet, key)
        except UnusableFileError as error:
            return f"its parcel {error}"
        return self._put(message, entry, kv, key.native_offset)

    def close(self) -> list[str]:
        """Stop wanting messages; return the ids of those that have no KV, or lost it already. Under the lock."""
        for entry, message in self._wanted:
            if message.entry is entry:
                self._core.table.unwant(message)
        # A message that was released meanwhile has no entry any more.
        current = [(entry, message) for entry, message in self._wanted if message.entry is entry]
        return [message.handle.id for entry, message in current if self._core.cache.lost(entry)]

    def _open(self, packet: KVPacket, key: KVKey) -> HostKV:
        geometry, size = self._core.model.adapter.geometry, len(packet.data)
        least, most = geometry.bytes_per_token * key.length, most_bytes(key.length, geometry)
        if not least <= size <= most or packet.nbytes != least:
            raise UnusableFileError(f"has {size} bytes for {packet.nbytes} of KV, not {least} to {most} for {least}")
        kv, at = opened(parsed(packet.data), key.written(), key.length, geometry, self._tenant.message_ids.seal)
        if at != key.native_offset:
            raise UnusableFileError(f"was encoded at position {at}, not {key.native_offset}")
        return kv

    def _put(self, message: Message, entry: CacheEntry, kv: HostKV, at: int) -> str | None:
        """Put KV into the pool or, if that is full, onto the host."""
        core = self._core
        with core.lock:
            self._tenant.require_open()
            if message.entry is not entry:
                return _STARTED_AGAIN
            if not core.cache.lost(entry):
                return None  # it was computed meanwhile
            # Evicts neither what a call waits for nor what has come with it.
            pool, has_room = core.pool, core.cache.evict_unwanted(core.pool.rounded(entry.tokens))
            segment = pool.allocate(entry.tokens, at, entry.tenant) if has_room else None
            if segment is None and not core.cache.put_below(entry, kv, at):
                return _NO_ROOM
            if segment is None:
                self._note_arrival(message, kv)
                return None
            pool.borrow(segment)
        with filled(core, pool, segment, kv):
            if self._tenant.closed or message.entry is not entry or not core.cache.lost(entry):
                pool.unpin(segment)
                self._tenant.require_open()
                return None if message.entry is entry else _STARTED_AGAIN
            core.cache.refill(entry, segment)
            self._note_arrival(message, kv)
        return None

    def _note_arrival(self, message: Message, kv: HostKV) -> None:
        message.promise = None
        self._core.tier_counters.add(message.tenant, "received_bytes", kv.nbytes)
