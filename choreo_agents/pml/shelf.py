"""The encoded pieces of a schema: leased, and so in whichever of the engine's memories has room for them, or in files.

device    the engine's KV memory
host      the engine's host memory, if it was given any: what left the device
disk      a folder of files: outlives the engine, and processes share it
nowhere   encoded when it is next read
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Literal

from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.keeping.kept import KeptKV
from choreo_agents.engine.transfer.facade import Leases
from choreo_agents.errors import CapacityError, ChoreoError, HandleError, InvalidRequestError
from choreo_agents.kv.entry import TierName
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey
from choreo_agents.pml.compiler import PieceKey, SchemaPiece

Place = Literal["device", "host", "disk", "nowhere"]
_TOGETHER = 4096
"""Tokens that are encoded as one batch, about."""


@dataclass(eq=False)
class _Slot:
    """A piece, and what became of it."""

    call: Prefill
    """What encodes it, once its parents are there."""
    key: KVKey
    """Its name, known before it is encoded."""
    parents: list[_Slot]
    depth: int
    leases: Leases | None = None
    """The shelf's lease, of no scope."""
    pinned: bool = False
    gone: bool = False
    """Whether the shelf does not know it any more."""
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is read from its file."""


class Shelf:
    """Leases the pieces of a schema, so that the engine keeps them. May be used from any thread.

    Its leases are of no scope; what it hands out is leased once more, for whoever asks.

    Args:
        engine: Encodes pieces, and has them on the device and the host.
        kept: Has them on disk, if it has a store; else every process encodes them again.
    """

    def __init__(self, engine: Engine, kept: KeptKV | None = None) -> None:
        self._engine, self._kept = engine, engine.kv.kept_in(None) if kept is None else kept
        stats, geometry = engine.stats(), engine.model.adapter.geometry
        self._together = max(1, min(_TOGETHER, stats.kv_budget_bytes // geometry.bytes_per_token // 4))
        self._lock = threading.RLock()
        self._slots: Mapping[PieceKey, _Slot] = {}

    def know(self, schema: str, pieces: Iterable[SchemaPiece]) -> None:
        """Have these pieces, parents first, instead of those before; nothing is encoded, and files stay.

        Args:
            schema: Its name, by which lineage and audits call its modules.
            pieces: What was known, and does not differ, stays as it is.
        """
        with self._lock:
            slots: dict[PieceKey, _Slot] = {}
            for piece in pieces:
                parents = [slots[parent] for parent in piece.parents]
                seen = [slot.key.handle for slot in parents], [slot.call.new_offset for slot in parents]
                author = "/".join([schema, *piece.module])
                call = Prefill(piece.tokens, *seen, piece.start, author, "module", confidential=piece.confidential)
                known = self._slots.get(piece.key)
                if known is None or known.call != call:
                    depth = 1 + max((parent.depth for parent in parents), default=0)
                    known = _Slot(call, self._engine.kv.key(call), parents, depth)
                slots[piece.key] = known
            before, self._slots = self._slots, slots
            for slot in set(before.values()).difference(slots.values()):
                slot.gone = True
                self._unpin(slot)
                self._give_up(slot)

    @contextmanager
    def brought(self, keys: Iterable[PieceKey], *, patient: bool = False) -> Iterator[dict[PieceKey, MessageHandle]]:
        """Have pieces, and what they attend to, ready to be read: from wherever they are, or encoded.

        Files are read by threads of their own while what has none is encoded.

        Args:
            keys: Whose.
            patient: Write what was encoded before encoding more.

        Yields:
            Handles by key, leased for as long as the block lasts: who needs them longer takes a lease.
        """
        with self._lock:
            asked = {key: self._slot(key) for key in keys}
        with ExitStack() as held:
            for level in _levels(asked.values()):
                missing = [slot for slot in level if not self._hold(slot, held)]
                filed = [slot for slot in missing if self._filed(slot)]
                with ThreadPoolExecutor(2, "choreo-library-read") as threads:
                    read = [threads.submit(self._read, slot, held) for slot in filed]
                    self._encode([slot for slot in missing if slot not in filed], held, patient=patient)
                    unread = [slot for slot, done in zip(filed, read, strict=True) if not done.result()]
                self._encode(unread, held, patient=patient)
            yield {key: slot.key.handle for key, slot in asked.items()}

    def pin(self) -> None:
        """Bring everything to the device, and keep it there."""
        with self.brought(self._slots) as handles:
            self._engine.kv.restore(list(handles.values()))
            with self._lock:
                for slot in (self._slots[key] for key in handles.keys() & self._slots.keys()):
                    if not slot.pinned:
                        self._lease(slot)
                        self._engine.kv.pin(slot.key.handle)
                        slot.pinned = True

    def unpin(self) -> None:
        """Keep it there no longer."""
        with self._lock:
            for slot in self._slots.values():
                self._unpin(slot)

    def evict(self, keys: Iterable[PieceKey], *, files: bool = False) -> None:
        """Give pieces up on the device and the host; with `files`, on disk, too. What is pinned stays."""
        self._kept.wait()
        with self._lock:
            free = [slot for slot in map(self._slot, keys) if self._tier(slot) is None or not slot.pinned]
            for slot in free:
                self._give_up(slot)
            if files:
                self._kept.discard([slot.key.id for slot in free])
        self._kept.wait()

    def place(self, key: PieceKey) -> tuple[Place, bool]:
        """The fastest memory that has a piece, and whether it is pinned there."""
        with self._lock:
            slot = self._slot(key)
            tier = self._tier(slot)
            if tier is None or tier == "lineage":
                return "disk" if self._filed(slot) else "nowhere", slot.pinned
            return tier, slot.pinned

    def _slot(self, key: PieceKey) -> _Slot:
        if key not in self._slots:
            raise InvalidRequestError(f"there is no piece {key!r} any more: its schema was replaced or forgotten")
        return self._slots[key]

    def _hold(self, slot: _Slot, held: ExitStack) -> bool:
        """Lease for a call what can be read as it is; what would be computed again is rather read from its file."""
        with self._lock:
            tier = self._tier(slot)
            there = tier is not None and (tier != "lineage" or not self._filed(slot))
            with suppress(HandleError):  # somebody else has released it
                if there:
                    held.callback(self._engine.kv.lease([slot.key.handle], scoped=False).release)
                    return True
            return False

    def _filed(self, slot: _Slot) -> bool:
        return self._kept.has(slot.key.id)

    def _read(self, slot: _Slot, held: ExitStack) -> bool:
        """Take a piece in from its file, once for all calls that wait for it; whether that was good."""
        assert self._kept.store is not None
        with slot.reading:
            if self._hold(slot, held):
                return True
            found = self._kept.store.load(slot.key)
            if found is None:
                return False
            try:
                with self._engine.scope():
                    self._engine.kv.adopt(slot.call, *found)
                    self._take(slot, held)
            except InvalidRequestError:
                self._kept.store.set_aside(slot.key.id, "holds other keys and values")
                return False
            except CapacityError:
                return False  # running calls need all memory: a prefill waits for it
            return True

    def _encode(self, slots: Sequence[_Slot], held: ExitStack, *, patient: bool) -> None:
        """Ask the engine, which encodes once what several calls ask for: nobody waits for what only another needs."""
        for together in _batches(slots, self._together):
            with self._engine.scope():
                handles = self._engine.prefill([slot.call for slot in together])
                for slot in together:
                    self._take(slot, held)
            if self._kept.store is not None:
                self._kept.keep(handles, lost_too=True)
                if patient:
                    written(self._kept)

    def _take(self, slot: _Slot, held: ExitStack) -> None:
        """Lease what has arrived, for a call and for the shelf."""
        held.callback(self._engine.kv.lease([slot.key.handle], scoped=False).release)
        with self._lock:
            if not slot.gone:
                self._lease(slot)

    def _lease(self, slot: _Slot) -> None:
        if self._tier(slot) is None:
            slot.leases = self._engine.kv.lease([slot.key.handle], scoped=False)

    def _tier(self, slot: _Slot) -> TierName | None:
        """The fastest memory of the engine's that has it; None: it is not leased, or was released by others."""
        found = None if slot.leases is None else self._engine.kv.tiers([slot.key.handle])[0]
        if found is None:
            slot.leases, slot.pinned = None, False
        return found

    def _unpin(self, slot: _Slot) -> None:
        if self._tier(slot) is not None and slot.pinned:
            slot.pinned = False
            with suppress(HandleError):
                self._engine.kv.unpin(slot.key.handle)

    def _give_up(self, slot: _Slot) -> None:
        leases, slot.leases = slot.leases, None
        if leases is not None:
            leases.release()


def written(kept: KeptKV) -> None:
    """Wait until all that was encoded is written; raises `OSError` if it cannot be."""
    with suppress(ChoreoError):  # what was lost meanwhile is written another time
        kept.flush()


def _levels(asked: Iterable[_Slot]) -> Iterator[list[_Slot]]:
    """These and all that they attend to, each once, parents in a level before."""
    found, left = dict[_Slot, None](), list(asked)
    while left:
        slot = left.pop()
        if slot not in found:
            found[slot] = None
            left += slot.parents
    for _, level in groupby(sorted(found, key=attrgetter("depth")), key=attrgetter("depth")):
        yield list(level)


def _batches(slots: Sequence[_Slot], most: int) -> Iterator[list[_Slot]]:
    """The same in parts of about so many tokens, or of one piece."""
    ends = accumulate(slot.key.length for slot in slots)
    for _, batch in groupby(zip(slots, ends, strict=True), key=lambda each: (each[1] - 1) // most):
        yield [slot for slot, _ in batch]
