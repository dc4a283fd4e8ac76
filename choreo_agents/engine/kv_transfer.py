"""KV out of the engine and into it: what one process has encoded serves another that runs the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from choreo_agents.engine.calling import Caller
from choreo_agents.engine.calls import Prefill, Usage
from choreo_agents.engine.desk import Desk
from choreo_agents.engine.intake import ReadCall
from choreo_agents.engine.ledger import Message
from choreo_agents.engine.memory_map import MemoryMap, TierName, tier_of
from choreo_agents.engine.methods import Job
from choreo_agents.engine.scope import Scope
from choreo_agents.errors import CapacityError, ContextLengthError, EngineClosedError, HandleError, InvalidRequestError
from choreo_agents.kv.archive import Archive, KVKey
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.memory import Holding
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import Parcel, shapes_of

T = TypeVar("T")


class KVTransfer:
    """Keys and values themselves, for those who keep them elsewhere or move them about: `engine.kv`.

    Unless it says otherwise, every method raises `HandleError` if a handle is unknown, released, or another model's.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._desk = caller.desk

    def key(self, of: MessageHandle | Prefill) -> KVKey:
        """What names a message's KV, as an archive writes it beside the KV.

        Args:
            of: The message, or the prefill that would make it: then nothing is encoded or leased, and its parents are
                named without asking whether the engine has them.

        Raises:
            InvalidRequestError: The prefill can never work, or is a mapped copy's.
        """
        desk = self._desk
        if isinstance(of, Prefill):
            read = desk.intake.read(of)
            with desk.core.lock:
                desk.require_open()
                return desk.intake.key(read)
        with desk.core.lock:
            message = desk.find(of)
            at = message.native_offset if message.holding is None else message.holding.native_offset
            seen = zip(message.parents, message.relative_offsets, strict=True)
            parents = tuple((parent.handle.id, offset) for parent, offset in seen)
            return KVKey(message.handle.id, message.handle.model, message.tokens, parents, at)

    def read(self, handle: MessageHandle) -> Parcel:
        """A copy of a message's keys and values, [layers, kv_heads, tokens, head_dim] each, on the host.

        It is brought into the KV memory for it, if it is not there.

        Raises:
            InvalidRequestError: The engine's method keeps no KV.
            CapacityError: Pinned and running messages leave no room for it now.
        """
        core = self._desk.core
        if not core.method.keeps_kv:
            raise InvalidRequestError(f"an engine of method {core.method.name!r} keeps no KV to read")
        with _in_pool(self._desk, handle) as (pool, segment):
            return pool.read(segment)

    def restore(self, handles: Sequence[MessageHandle]) -> None:
        """Bring messages into the KV memory, or compute them again, before they are read.

        Raises:
            CapacityError: Pinned and running messages leave no room for one of them now.
        """
        for handle in handles if self._desk.core.method.keeps_kv else ():
            with _in_pool(self._desk, handle):
                pass

    def adopt(self, call: Prefill, parcel: Parcel, native_offset: int | None = None) -> MessageHandle:
        """Take in KV that was encoded elsewhere, in place of a prefill: nothing is encoded.

        The message is as if it had been prefilled here: found again by its content, and computed again from its
        lineage if its KV is lost. If the engine has its KV already, that serves.

        Args:
            call: The prefill that made it.
            parcel: Its keys and values, as `read` gives them.
            native_offset: The position that its first token was encoded at; None: where the call places it.

        Returns:
            A leased handle.

        Raises:
            InvalidRequestError: The call can never work, or the parcel is not of this model's shapes and type.
            CapacityError: Pinned and running messages leave no room for it now.
        """
        if not isinstance(call, Prefill):
            raise InvalidRequestError(f"only a Prefill can be adopted, not {call!r}")
        desk, read, scope = self._desk, self._desk.intake.read(call), self._caller.scope()
        core = desk.core
        with core.lock:
            desk.require_open()
            job = _job(desk, read)
            _require_shapes(desk, parcel, len(job.tokens))
            at = _require_native(desk, job, native_offset)
            known, pool = core.ledger.get(desk.intake.identity(job, job.tokens)), core.pool
            if known is not None and known.holding is not None and not core.memory.lost(known.holding):
                return _answered(desk, read, known, scope)
            if not core.method.keeps_kv:
                return _answered(desk, read, _entered(desk, read, job, at, None), scope)
            segment = _room(desk, len(job.tokens), at)
        _filled(desk, pool, segment, parcel)
        with core.lock:
            if desk.closed:
                pool.unpin(segment)
                desk.require_open()
            # If the engine has started again meanwhile, its memory is empty: lineage is left.
            message = _entered(desk, read, job, at, segment if core.pool is pool else None)
            core.movements.adopted += 1
            return _answered(desk, read, message, scope)

    def lease(self, handles: Sequence[MessageHandle], *, scoped: bool = True) -> Leases:
        """Take one more lease of each message, or none if one of them raises.

        Args:
            handles: What to lease.
            scoped: Whether the end of the scope drops them, too; else they last until they are released.
        """
        scope, desk = self._caller.scope() if scoped else None, self._desk
        with desk.core.lock:
            found = [desk.find(handle) for handle in handles]
            for message in found if scope is None or not scope.closed else ():
                desk.core.ledger.lease(message, scope)
        return Leases(desk, scope, list(handles))

    def tiers(self, handles: Sequence[MessageHandle]) -> list[TierName | None]:
        """The fastest tier that has each message's KV: `"lineage"` if none has, None if it is not known and leased."""
        core = self._desk.core
        with core.lock:
            self._desk.require_open()
            found = [core.ledger.get(handle.id) for handle in handles]
            return [
                None
                if message is None or message.tenant != self._desk.tenant
                else tier_of(message.holding, core.memory)
                for message in found
            ]

    def park(self, what: Scope | Sequence[MessageHandle] | None = None) -> None:
        """Give the pool's memory back for now: of messages, of what only a scope leases, or of everything.

        What is being read or pinned stays. The rest goes to the host or the disk, or is forgotten and computed again,
        and comes back when it is next read: handles stay good.
        """
        desk, core = self._desk, self._desk.core
        with core.lock:
            desk.require_tenancy()
            if what is None or isinstance(what, Scope):
                mine = [message for message in core.ledger.messages() if message.tenant == desk.tenant]
                parked = [m for m in mine if what is None or m.leased_only_within(what)]
            else:
                parked = [desk.find(handle) for handle in what]
            core.memory.park(m.holding for m in parked if m.holding is not None)

    def pin(self, handle: MessageHandle) -> None:
        """Keep a message in the pool, however little room that leaves; `unpin` takes it back."""
        _pin(self._desk, handle, 1)

    def unpin(self, handle: MessageHandle) -> None:
        """Undo one `pin`."""
        _pin(self._desk, handle, -1)

    def archive(self, folder: str | Path, budget_bytes: int = 1 << 34) -> Archive:
        """KV of this model and tenant in a folder that outlives the engine and may be shared between processes.

        Args:
            folder: Has a folder for each model in it, and in that one for each tenant.
            budget_bytes: Of this model's and tenant's files; the longest unused ones are removed.
        """
        desk = self._desk
        with desk.core.lock:
            desk.require_open()
            encoder = desk.intake.own_encoder()
        place = Path(folder) / encoder / desk.tenant
        return Archive(place, desk.core.model.adapter.geometry, desk.intake.seal, budget_bytes)

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which of the tenant's authors keep it there."""
        with self._desk.core.lock:
            self._desk.require_tenancy()
            return self._desk.core.memory_map(self._desk.tenant)

    def keeper(self, make: Callable[..., T], *args: Any) -> T:
        """What keeps messages for this tenant: made once, and found again for as long as the tenancy lasts.

        Args:
            make: A function or class; the same one finds the same again. Called under the engine's lock.
            args: What it is called with.
        """
        return self._desk.keeper(make, *args)


@dataclass
class Leases:
    """Leases that are dropped together, in whichever scope that happens."""

    desk: Desk
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
                self.desk.release(handle, self.scope, spare_only=False)


def _job(desk: Desk, read: ReadCall) -> Job:
    job = desk.intake.job(read)
    if job.mapper:
        raise InvalidRequestError("a cache mapper's copy is made of its source: it is not adopted")
    return job


@contextmanager
def _in_pool(desk: Desk, handle: MessageHandle) -> Iterator[tuple[KVPool, Segment]]:
    """A message's segment, wherever its KV was before; it stays in the pool for the block."""
    core = desk.core
    with core.lock:
        message = desk.find(handle)
        holding = core.ledger.want(message)
    try:
        while True:
            with core.lock:
                if message.holding is not holding:
                    holding = core.ledger.want(message)  # the engine has started again meanwhile
                there, pool = _brought(desk, message, holding), core.pool
                if isinstance(there, Segment):
                    pool.pin(there)
                    break
            there()
        try:
            yield pool, there
        finally:
            with core.lock:
                pool.unpin(there)
    finally:
        with core.lock:
            if message.holding is holding:
                core.ledger.unwant(message)


def _brought(desk: Desk, message: Message, holding: Holding) -> Segment | Callable[[], object]:
    """A wanted message's segment, brought into the pool; or what to wait with before that can be."""
    core = desk.core
    desk.require_open()
    if core.memory.lost(holding):
        done, request = core.restorer.recompute(message, None)
        if request is not None:
            core.loop.submit([request])
        return done.result
    if not core.memory.fetch(holding):
        assert holding.fetching is not None
        return partial(wait, [holding.fetching])
    if holding.segment is None:
        core.method.evict(core.pool.rounded(holding.tokens))
        if not core.memory.restore(holding):
            raise _no_room(desk, holding.tokens)
    assert holding.segment is not None
    if holding.arriving is not None and not holding.arriving.is_there:
        return holding.arriving.over.wait
    return holding.segment


def _pin(desk: Desk, handle: MessageHandle, by: int) -> None:
    """Keep a message in the pool, once it is there, until it was unpinned as often."""
    with desk.core.lock:
        message = desk.find(handle)
        if desk.core.method.keeps_kv:
            holding = desk.core.ledger.place(message)
            if holding.pins + by < 0:
                raise InvalidRequestError(f"handle {handle.id!r} was unpinned more often than pinned")
            holding.pins += by


def _room(desk: Desk, tokens: int, at: int) -> Segment:
    core = desk.core
    core.method.evict(core.pool.rounded(tokens))
    segment = core.pool.allocate(tokens, at)
    if segment is None:
        raise _no_room(desk, tokens)
    return segment


def _no_room(desk: Desk, tokens: int) -> CapacityError:
    pool = desk.core.pool
    return CapacityError(
        f"KV memory has room for {pool.free_tokens} of {tokens} tokens now: release or unpin messages"
        f"{desk.core.method.pinned(desk.tenant)}, or load the engine with a larger kv_budget_bytes"
    )


def _filled(desk: Desk, pool: KVPool, segment: Segment, parcel: Parcel) -> None:
    """Copy KV into a segment, without the engine's lock: no step knows the segment yet, so steps go on meanwhile."""
    try:
        pool.write(segment, parcel)
    except BaseException:
        with desk.core.lock:
            pool.unpin(segment)
        raise


def _entered(desk: Desk, read: ReadCall, job: Job, at: int, segment: Segment | None) -> Message:
    """The message in the ledger, with the segment as its KV."""
    core, call = desk.core, read.call
    assert isinstance(call, Prefill)
    known = core.ledger.get(desk.intake.identity(job, job.tokens))
    usage = Usage(0, 0, None, 0.0) if known is None else known.usage
    message = desk.intake.message(job, job.tokens, call.author, call.role, usage)
    message.native_offset, message.label = at, job.label(call.author, call.role)
    return core.ledger.enter(message, segment)


def _require_shapes(desk: Desk, parcel: Parcel, tokens: int) -> None:
    wanted = shapes_of(desk.core.model.adapter.geometry, tokens, packed=False)
    if not isinstance(parcel, Parcel) or parcel.shapes() != wanted:
        found = parcel.shapes() if isinstance(parcel, Parcel) else parcel
        raise InvalidRequestError(f"the parcel is not of {tokens} tokens of this model: {found!r}, not {wanted!r}")


def _require_native(desk: Desk, job: Job, native_offset: int | None) -> int:
    at = job.placement.new_offset if native_offset is None else native_offset
    most = desk.core.model.adapter.max_positions
    if isinstance(at, bool) or not isinstance(at, int) or min(at, at + min(job.placement.relative(), default=0)) < 0:
        raise InvalidRequestError(f"native_offset {at!r} puts the message or a parent before position 0")
    lengths = [len(parent.tokens) for parent in job.parents]
    reach = job.placement.end(lengths, len(job.tokens)) - job.placement.new_offset + at
    if reach > most:
        raise ContextLengthError(f"the message was encoded up to position {reach}, the model's context ends at {most}")
    return at


def _answered(desk: Desk, read: ReadCall, message: Message, scope: Scope | None) -> MessageHandle:
    desk.label_of(read).put_on(message)
    ledger = desk.core.ledger
    if scope is None or not scope.closed:
        ledger.lease(message, scope)
    ledger.drop_if_unleased(message)
    return message.handle
