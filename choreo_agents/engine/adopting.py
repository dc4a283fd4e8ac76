"""KV out of the engine and into it: what one process has encoded serves another that runs the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from choreo_agents.engine.calls import Prefill, Usage
from choreo_agents.engine.desk import Desk
from choreo_agents.engine.intake import ReadCall
from choreo_agents.engine.ledger import Message
from choreo_agents.engine.memory_map import TierName, tier_of
from choreo_agents.engine.merging import Merging
from choreo_agents.engine.methods import Job
from choreo_agents.engine.scope import Scope, left
from choreo_agents.errors import CapacityError, ContextLengthError, HandleError, InvalidRequestError
from choreo_agents.kv.archive import Archive, Entry
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.memory import Holding
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.kv.tiers import Parcel, shapes_of


class Adopting(Merging):
    """What an engine offers to those who keep its KV elsewhere, such as a library of encoded modules."""

    def identify(self, call: Prefill) -> MessageHandle:
        """The handle that a prefill would give. Nothing is encoded or leased.

        Raises:
            InvalidRequestError: The call can never work.
            HandleError: A parent is unknown, released, or another model's.
        """
        desk, read = self._desk, self._desk.intake.read(call)
        with desk.core.lock:
            return _named(desk, _job(desk, read))

    def holds(self, handle: MessageHandle) -> bool:
        """Whether a message is known and leased, wherever its KV is."""
        with self._desk.core.lock:
            known = self._desk.core.ledger.get(handle.id)
            return known is not None and known.tenant == self._desk.tenant

    def entry(self, handle: MessageHandle) -> Entry:
        """What a message's KV depends on, as an archive writes it beside the KV.

        Raises:
            HandleError: It is unknown, released, or another model's.
        """
        with self._desk.core.lock:
            message = self._desk.intake.find(handle)
            at = message.native_offset if message.holding is None else message.holding.native_offset
            return _entry(message.handle, message.tokens, message.parents, message.relative_offsets, at)

    def entry_for(self, tokens: Sequence[int], start: int, seen: Sequence[tuple[Entry, int]] = ()) -> Entry:
        """The same of a message that a prefill with the engine's own adapter would make.

        Args:
            tokens: Its tokens.
            start: The position of the first.
            seen: What it attends to, whether the engine has it or not, and where each appears.
        """
        desk = self._desk
        with desk.core.lock:
            encoder = self._encoder()
            parents = tuple((entry.id, offset - start) for entry, offset in seen)
            named = desk.intake.name(
                encoder, tuple(tokens), [each[0] for each in parents], [each[1] for each in parents]
            )
            return Entry(named, encoder, tuple(tokens), parents, start)

    def read_kv(self, handle: MessageHandle) -> Parcel:
        """A copy of a message's keys and values, [layers, kv_heads, tokens, head_dim] each, on the host.

        It is brought into the KV memory for it, if it is not there.

        Raises:
            InvalidRequestError: The engine's method keeps no KV.
            HandleError: It is unknown, released, or another model's.
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
            HandleError: A handle is unknown, released, or another model's.
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
            parcel: Its keys and values, as `read_kv` gives them.
            native_offset: The position that its first token was encoded at; None: where the call places it.

        Returns:
            A leased handle.

        Raises:
            InvalidRequestError: The call can never work, or the parcel is not of this model's shapes and type.
            HandleError: A parent is unknown, released, or another model's.
            CapacityError: Pinned and running messages leave no room for it now.
        """
        if not isinstance(call, Prefill):
            raise InvalidRequestError(f"only a Prefill can be adopted, not {call!r}")
        desk, read, scope = self._desk, self._desk.intake.read(call), self._scope()
        core = desk.core
        with core.lock:
            core.loop.require_open()
            job = _job(desk, read)
            _require_shapes(desk, parcel, len(job.tokens))
            at = _require_native(desk, job, native_offset)
            known, pool = core.ledger.get(_named(desk, job).id), core.pool
            if known is not None and known.holding is not None and not core.memory.lost(known.holding):
                return _answered(desk, read, known, scope)
            if not core.method.keeps_kv:
                return _answered(desk, read, _entered(desk, read, job, at, None), scope)
            segment = _room(desk, len(job.tokens), at)
        _filled(desk, pool, segment, parcel)
        with core.lock:
            # If the engine has started again meanwhile, its memory is empty: lineage is left.
            message = _entered(desk, read, job, at, segment if core.pool is pool else None)
            core.movements.adopted += 1
            return _answered(desk, read, message, scope)

    def lease(self, handles: Sequence[MessageHandle]) -> Leases:
        """Take one more lease of each message; the end of the scope drops them, too.

        Raises:
            HandleError: A handle is unknown, released, or another model's. Nothing is leased then.
        """
        scope, desk = self._scope(), self._desk
        with desk.core.lock:
            found = [desk.intake.find(handle) for handle in handles]
            for message in found if scope is None or not scope.closed else ():
                desk.core.ledger.lease(message, scope)
        return Leases(desk, scope, list(handles))

    def tiers(self, handles: Sequence[MessageHandle]) -> list[TierName]:
        """The fastest tier that has each message's KV; `"lineage"` if none has.

        Raises:
            HandleError: A handle is unknown, released, or another model's.
        """
        with self._desk.core.lock:
            memory = self._desk.core.memory
            return [tier_of(self._desk.intake.find(handle).holding, memory) for handle in handles]

    def evict(self, handles: Sequence[MessageHandle]) -> None:
        """Take messages out of the KV memory, as far as nothing reads or pins them: handles stay good (see `park`).

        Raises:
            HandleError: A handle is unknown, released, or another model's.
        """
        with self._desk.core.lock:
            found = [self._desk.intake.find(handle).holding for handle in handles]
            self._desk.core.memory.park(holding for holding in found if holding is not None)

    @contextmanager
    def unscoped(self) -> Iterator[None]:
        """Leases that are taken or dropped in the block are of no scope, whatever scopes are around it."""
        with left(id(self._desk)):
            yield

    def archive(self, folder: str | Path, budget_bytes: int = 1 << 34) -> Archive:
        """KV of this model and tenant in a folder that outlives the engine and may be shared between processes.

        Args:
            folder: Has a folder for each model in it, and in that one for each tenant.
            budget_bytes: Of this model's and tenant's files; the longest unused ones are removed.
        """
        geometry = self._desk.core.model.adapter.geometry
        place = Path(folder) / self._encoder() / self._desk.tenant
        return Archive(place, geometry, self._desk.intake.seal, budget_bytes)

    def _encoder(self) -> str:
        """Fingerprint of what encodes calls that name no adapter."""
        core = self._desk.core
        with core.lock:
            adapter = core.adapters.lora_key(None, self._desk.tenant)
        return core.model.adapter.fingerprint + (f"+{adapter}" if adapter else "")


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
            with suppress(HandleError):
                self.desk.release(handle, self.scope, spare_only=False)


def _job(desk: Desk, read: ReadCall) -> Job:
    job = desk.intake.job(read)
    if job.mapper:
        raise InvalidRequestError("a cache mapper's copy is made of its source: it is not adopted")
    return job


def _named(desk: Desk, job: Job) -> MessageHandle:
    return MessageHandle(
        id=desk.intake.identity(job, job.tokens), model=desk.intake.encoder(job), length=len(job.tokens)
    )


def _entry(
    handle: MessageHandle, tokens: Sequence[int], parents: Sequence[Message], relative: Sequence[int], at: int
) -> Entry:
    seen = tuple((parent.handle.id, offset) for parent, offset in zip(parents, relative, strict=True))
    return Entry(handle.id, handle.model, tuple(tokens), seen, at)


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
    core.loop.require_open()
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
    known = core.ledger.get(_named(desk, job).id)
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
