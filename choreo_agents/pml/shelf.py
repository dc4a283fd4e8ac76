"""Encoded texts, each in whichever memory has room for it, and brought to the device when they are read.

device    the engine's KV memory
host      the engine's host memory, if it was given any: what left the device
disk      a folder of files: outlives the engine, and processes share it
nowhere   encoded when it is next read
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from choreo_agents.engine import Engine, Prefill
from choreo_agents.errors import CapacityError, ChoreoError, InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVStore
from choreo_agents.kv.store.eviction import LongestUnused
from choreo_agents.pml.slots import Place, Recipe, RecipeSlot, batches, levels, needed

OnReady = Callable[[int], None]
"""Told how many more tokens are ready to be read."""
_TOGETHER = 4096
"""Tokens that are encoded as one batch, about."""


@dataclass(frozen=True)
class Budgets:
    """Bytes that a shelf's texts may take; None: as many as the engine has."""

    device: int | None = None
    host: int | None = None


class Shelf:
    """Pins encoded texts while they are needed, and keeps the others within budgets. May be used from any thread.

    Its leases are of no scope; what it hands out is leased once more, for whoever asks.

    Args:
        engine: Encodes texts, and has them on the device and the host.
        store: Has them on disk; None: every process encodes them again.
        budgets: Of device and host.
    """

    def __init__(self, engine: Engine, store: KVStore | None, budgets: Budgets) -> None:
        self._engine = engine
        # A twin that re-encodes text has nothing to keep.
        self._store = store if engine.method == "choreo" else None
        self._kept = None if self._store is None else engine.kv.kept_in(self._store)
        self._budgets = budgets
        self._token_bytes = engine.model.adapter.geometry.bytes_per_token
        self._together = min(_TOGETHER, engine.stats().kv_budget_bytes // self._token_bytes // 4)
        self._lock = threading.RLock()
        self._slots: dict[str, RecipeSlot] = {}
        self._order: LongestUnused[RecipeSlot] = LongestUnused()
        """All of them, and those that calls still need: pinned by each of these, and while they are to stay."""
        self._reads = ThreadPoolExecutor(2, "choreo-library-read")

    def add(self, recipes: Iterable[Recipe]) -> None:
        """Know texts, parents first; nothing is encoded. What is known under a key, and differs, is replaced."""
        with self._lock:
            for recipe in recipes:
                parents = tuple(self._slots[parent] for parent in recipe.parents)
                known = self._slots.get(recipe.key)
                if known is None or known.recipe != recipe or known.parents != parents:
                    self.remove([recipe.key])
                    seen = [parent.kv_key.handle for parent in parents]
                    call = Prefill(recipe.tokens, seen, [parent.recipe.start for parent in parents], recipe.start)
                    slot = RecipeSlot(recipe, parents, self._engine.kv.key(call))
                    self._slots[recipe.key] = slot
                    self._order.add(slot, slot.tokens * self._token_bytes)

    def remove(self, keys: Iterable[str]) -> None:
        """Forget texts; their files stay."""
        with self._lock:
            for slot in (self._slots.pop(key, None) for key in keys):
                if slot is not None:
                    slot.removed = True
                    self._unpin(slot)
                    self._forget_unneeded(slot)

    @contextmanager
    def brought(
        self, keys: Iterable[str], on_ready: OnReady = lambda _: None, *, patient: bool = False
    ) -> Iterator[dict[str, MessageHandle]]:
        """Have texts, and what they attend to, ready to be read: from wherever they are, or encoded.

        Files are read by threads of their own while what has none is encoded.

        Args:
            keys: Whose.
            on_ready: Is told of progress.
            patient: Write what was encoded, and keep to the budgets, before encoding more.

        Yields:
            Handles by key. The shelf's leases of them last as long as the block does: who needs them longer takes one.
        """
        with self._using(keys) as (asked, slots):
            self._ready_all(slots, on_ready, patient=patient)
            yield {key: slot.leased() for key, slot in asked.items()}

    def pin(self, keys: Iterable[str]) -> None:
        """Keep texts on the device; brings them there."""
        with self._using(keys) as (asked, slots):
            self._ready_all(slots)
            self._engine.kv.restore([slot.leased() for slot in asked.values()])
            with self._lock:
                for slot in asked.values():
                    if not (slot.pinned or slot.removed):
                        self._engine.kv.pin(slot.leased())
                        slot.pinned = True
                        self._order.pin(slot)

    def unpin(self, keys: Iterable[str]) -> None:
        """Keep them there no longer."""
        with self._lock:
            for slot in (self._slots[key] for key in keys):
                self._unpin(slot)

    def evict(self, keys: Iterable[str], *, files: bool = False) -> None:
        """Give texts up on the device and the host; with `files`, on disk, too. What is pinned or needed now stays."""
        if self._kept is not None:
            self._kept.wait()
        with self._lock:
            free = [slot for slot in (self._slots[key] for key in keys) if not self._is_needed(slot)]
            for slot in free:
                slot.give_up()
            if files and self._kept is not None:
                self._kept.discard([slot.kv_key.id for slot in free])
        if files and self._kept is not None:
            self._kept.wait()

    def place(self, key: str) -> tuple[Place, bool]:
        """The fastest memory that has a text, and whether it is pinned there."""
        with self._lock:
            slot = self._slots[key]
            return self._place(slot), self._is_pinned(slot)

    def flush(self) -> None:
        """Wait until all that was encoded is written; raises `OSError` if it cannot be."""
        if self._kept is not None:
            with suppress(ChoreoError):  # what was lost meanwhile is written another time
                self._kept.flush()
        self._make_room()  # what was being written could not leave its memory

    def close(self) -> None:
        """Write what is to be written, and give everything up; files stay."""
        if self._kept is not None:
            self._kept.close()
        self._reads.shutdown(wait=True)
        self.remove(list(self._slots))

    @contextmanager
    def _using(self, keys: Iterable[str]) -> Iterator[tuple[dict[str, RecipeSlot], list[RecipeSlot]]]:
        """Texts by key, and with all that they attend to, parents first; none is given up within the block."""
        with self._lock:
            asked = {key: self._slots[key] for key in keys}
            slots = needed(asked.values())
            for slot in slots:
                self._order.pin(slot)
                self._order.use(slot)
        try:
            yield asked, slots
        finally:
            with self._lock:
                for slot in slots:
                    self._order.unpin(slot)
                    if slot.removed:
                        self._forget_unneeded(slot)

    def _ready_all(
        self, slots: Sequence[RecipeSlot], on_ready: OnReady = lambda _: None, *, patient: bool = False
    ) -> None:
        for level in levels(slots):
            self._arrive(level, on_ready, patient=patient)
        self._make_room()

    def _arrive(self, level: Sequence[RecipeSlot], on_ready: OnReady, *, patient: bool) -> None:
        """Have texts ready whose parents are.

        A file is read once for all calls that wait for it. What has none is asked of the engine by each call, which
        encodes it once for all of them: nobody waits for what only another call needs.
        """
        reading, unfiled = dict[RecipeSlot, Future[bool]](), list[RecipeSlot]()
        try:
            with self._lock:
                for slot in level:
                    if slot.arriving is None and self._ready(slot):
                        on_ready(slot.tokens)
                    elif slot.arriving is not None or self._filed(slot):
                        slot.arriving = reading[slot] = slot.arriving or self._reads.submit(self._read, slot)
                    else:
                        unfiled.append(slot)
            self._encode(unfiled, on_ready, patient=patient)
            unread = [slot for slot, done in reading.items() if not done.result()]
            on_ready(sum(slot.tokens for slot in reading if slot not in unread))
            self._encode(unread, on_ready, patient=patient)
        finally:
            wait(reading.values())  # what is read is kept, and given up only by who is done with it

    def _ready(self, slot: RecipeSlot) -> bool:
        """Whether it can be read as it is. What the engine would have to compute again is rather read from a file."""
        tier = slot.tier(self._engine)
        return tier is not None and (tier != "lineage" or not self._filed(slot))

    def _filed(self, slot: RecipeSlot) -> bool:
        return self._store is not None and self._store.has(slot.kv_key.id)

    def _read(self, slot: RecipeSlot) -> bool:
        """Take a text in from its file; whether that was good."""
        try:
            return self._store is not None and _taken_in(self._engine, self._store, slot, self._keep)
        finally:
            with self._lock:
                slot.arriving = None

    def _encode(self, slots: Sequence[RecipeSlot], on_ready: OnReady, *, patient: bool) -> None:
        for together in batches(slots, self._together):
            with self._engine.scope():
                handles = self._engine.prefill([slot.call() for slot in together])
                for slot, handle in zip(together, handles, strict=True):
                    self._keep(slot, handle)
            if self._kept is not None:
                self._kept.keep(handles, lost_too=True)
            if patient:
                self.flush()
            on_ready(sum(slot.tokens for slot in together))

    def _keep(self, slot: RecipeSlot, handle: MessageHandle) -> None:
        """Lease what has arrived, unless another call has done so."""
        with self._lock:
            if slot.tier(self._engine) is None:
                slot.keep(self._engine, handle)

    def _place(self, slot: RecipeSlot) -> Place:
        tier = slot.tier(self._engine)
        if tier is not None and tier != "lineage":
            return tier
        return "disk" if self._filed(slot) else "nowhere"

    def _make_room(self) -> None:
        """Take what was longest not read off the device, then off the host, until both budgets are kept.

        What is needed right now stays, however little room that leaves.
        """
        with self._lock:
            for slot in self._over("device", self._budgets.device):
                self._engine.kv.park([slot.leased()])
            for slot in self._over("host", self._budgets.host):
                slot.give_up()

    def _over(self, place: Place, budget: int | None) -> list[RecipeSlot]:
        """What has to leave a memory."""
        if budget is None:
            return []
        return self._order.leaving(budget, {slot for slot in self._slots.values() if self._place(slot) == place})

    def _is_needed(self, slot: RecipeSlot) -> bool:
        """Whether a call needs it right now, or it is to stay."""
        self._is_pinned(slot)
        return self._order.is_pinned(slot)

    def _is_pinned(self, slot: RecipeSlot) -> bool:
        """Whether it is to stay; not if somebody else has released it."""
        if slot.pinned and slot.tier(self._engine) is None:
            slot.pinned = False
            self._order.unpin(slot)
        return slot.pinned

    def _unpin(self, slot: RecipeSlot) -> None:
        if self._is_pinned(slot):
            slot.unpin(self._engine)
            self._order.unpin(slot)

    def _forget_unneeded(self, slot: RecipeSlot) -> None:
        """It was removed: give it up, unless a call needs it."""
        if not self._order.is_pinned(slot):
            slot.give_up()
            self._order.remove(slot)


def _taken_in(
    engine: Engine, store: KVStore, slot: RecipeSlot, keep: Callable[[RecipeSlot, MessageHandle], None]
) -> bool:
    """Read a text from its file; whether that was good."""
    found = store.load(slot.kv_key)
    if found is None:
        return False
    try:
        with engine.scope():
            keep(slot, engine.kv.adopt(slot.call(), *found))
    except InvalidRequestError:
        store.set_aside(slot.kv_key.id, "holds other keys and values")
        return False
    except CapacityError:
        return False  # running calls need all memory: a prefill waits for it
    return True
