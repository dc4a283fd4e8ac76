"""The KV of messages on its way between two engines: it leaves one, and comes into the other as it was, bit by bit.

What a message is computed from goes ahead of it (see `sending`): where its KV is lost on the way, or refused, it is
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from choreo_agents.engine.delegation import (
    CacheEntry,
    HostKV,
    KVKey,
    Message,
    Segment,
    Tenant,
    UnusableFileError,
    copied,
    filled,
    in_bytes,
    kv_bytes,
    kv_key,
    most_bytes,
    opened,
    parsed,
    sealed,
)
from choreo_agents.errors import ChoreoError

_NO_ROOM = "there is no room for it now, neither in the pool nor on the host"
_STARTED_AGAIN = "the engine has started again meanwhile: send it again"


@dataclass(frozen=True)
class KVPacket:
    """A message's keys and values on their way between two engines, under the tenant's seal.

    Whoever gets hold of it can read it; only who has the tenant's key can make one that is believed.
    """

    id: str
    """The message's."""
    nbytes: int
    """Of keys and values, as they are kept below the pool."""
    data: bytes
    """What a file of the tenant's would hold."""


def export_kv(tenant: Tenant, ids: Sequence[str]) -> list[KVPacket]:
    """Copies of what the pool, the host or a file has of messages, or will have because a call under way reads them.

    Steps go on meanwhile, and nothing is computed for it alone. Slow; from any thread but the engine's.

    Args:
        tenant: Whose.
        ids: Of the messages. Those whose KV is not to be had are left out.

    Raises:
        EngineClosedError: The engine or the tenancy was closed.
    """
    core, seal, made = tenant.core, tenant.message_ids.seal, list[KVPacket]()
    for message_id in dict.fromkeys(ids):
        with core.lock:
            message = core.table.known(message_id)
        if message is None or message.tenant != tenant.name:
            continue
        found: tuple[KVKey, HostKV] | None = None
        with suppress(ChoreoError):  # who computed it has failed, or the engine has started again
            found = copied(core, message, lost_too=False)
        if found is not None:
            key, kv = found
            made.append(KVPacket(key.id, kv.nbytes, in_bytes(sealed(key, kv, seal))))
    with core.lock:
        tenant.require_open()
        core.tier_counters.add(tenant.name, "sent_bytes", sum(parcel.nbytes for parcel in made))
    return made


def import_kv(tenant: Tenant, parcels: Sequence[KVPacket]) -> dict[str, str]:
    """Give messages the KV that has come for them; one that has its KV keeps that.

    What no call waits for may have to leave the pool for it. Steps go on meanwhile. Slow; from any thread but the
    engine's.

    Args:
        tenant: Whose.
        parcels: Of messages that are known here by their lineage (see `LineageExchange.take_in`) and that somebody
            leases, or waits for. Nothing of them changes but that they have KV.

    Returns:
        Why those that were refused were, by the ids of their messages: these are as they were before.

    Raises:
        EngineClosedError: The engine or the tenancy was closed, or started again meanwhile.
    """
    core, unpacking = tenant.core, _Unpacking(tenant)
    try:
        answers = [(parcel.id, unpacking.take(parcel)) for parcel in parcels]
    finally:
        with core.lock:
            lost = unpacking.close()
    return dict.fromkeys(lost, _NO_ROOM) | {each: why for each, why in answers if why is not None}


class _Unpacking:
    """Of parcels that come together. Wants their messages: one that has come does not leave for the next."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant, self._core = tenant, tenant.core
        self._coming: dict[CacheEntry, Message] = {}
        self._came: set[CacheEntry] = set()

    def take(self, parcel: KVPacket) -> str | None:
        """Why a parcel is refused; None: its message has KV."""
        with self._core.lock:
            self._tenant.require_open()
            message = self._core.table.known(parcel.id)
            if message is None or message.tenant != self._tenant.name:
                return "it is not known here: what it is computed from comes first"
            if not self._core.method.keeps_kv:
                return f"an engine of method {self._core.settings.method!r} keeps no KV"
            if not message.leases and (message.entry is None or not message.entry.wanted):
                return "nobody leases it here, or waits for it"
            entry = self._wanted(message)
            if not self._core.cache.lost(entry):
                return None
            key = kv_key(message)
        try:
            kv = self._opened(parcel, key)
        except UnusableFileError as error:
            return f"its parcel {error}"
        return self._put(message, entry, kv, key.native_offset)

    def close(self) -> list[str]:
        """Want nothing any more; the ids of messages whose KV has come, and was lost already. Under the lock."""
        there = [(entry, message) for entry, message in self._coming.items() if message.entry is entry]
        for _, message in there:
            self._core.table.unwant(message)
        came = [(entry, message) for entry, message in there if entry in self._came and message.entry is entry]
        return [message.handle.id for entry, message in came if self._core.cache.lost(entry)]

    def _wanted(self, message: Message) -> CacheEntry:
        entry = message.entry
        if entry is None or entry not in self._coming:
            entry = self._core.table.want(message)
            self._coming[entry] = message
        return entry

    def _opened(self, parcel: KVPacket, key: KVKey) -> HostKV:
        geometry, size = self._core.model.adapter.geometry, len(parcel.data)
        least, most = kv_bytes(key, geometry), most_bytes(key, geometry)
        if not least <= size <= most or parcel.nbytes != least:
            raise UnusableFileError(f"has {size} bytes for {parcel.nbytes} of KV, not {least} to {most} for {least}")
        kv, at = opened(parsed(parcel.data), key, geometry, self._tenant.message_ids.seal)
        if at != key.native_offset:
            raise UnusableFileError(f"was encoded at position {at}, not {key.native_offset}")
        return kv

    def _put(self, message: Message, entry: CacheEntry, kv: HostKV, at: int) -> str | None:
        """Bring KV into the pool or, if that has no room, onto the host."""
        core = self._core
        with core.lock:
            self._tenant.require_open()
            if message.entry is not entry:
                return _STARTED_AGAIN
            if not core.cache.lost(entry):
                return None  # it was computed meanwhile
            pool, segment = core.pool, self._room(entry, at)
            if segment is None and not core.cache.put_below(entry, kv, at):
                return _NO_ROOM
            if segment is None:
                self._arrived(message, entry, kv)
                return None
        with filled(self._tenant, pool, segment, kv):
            if self._tenant.closed or message.entry is not entry or not core.cache.lost(entry):
                pool.unpin(segment)
                self._tenant.require_open()
                return None if message.entry is entry else _STARTED_AGAIN
            core.cache.refill(entry, segment)
            self._arrived(message, entry, kv)
        return None

    def _room(self, entry: CacheEntry, at: int) -> Segment | None:
        """A borrowed segment, if nothing has to leave for it that a call waits for, or that has come with it."""
        core = self._core
        if not core.cache.evict_unwanted(core.pool.rounded(entry.tokens)):
            return None
        segment = core.pool.allocate(entry.tokens, at, entry.tenant)
        if segment is not None:
            core.pool.borrow(segment)
        return segment

    def _arrived(self, message: Message, entry: CacheEntry, kv: HostKV) -> None:
        self._came.add(entry)
        message.promise = None
        self._core.tier_counters.add(entry.tenant, "received_bytes", kv.nbytes)
