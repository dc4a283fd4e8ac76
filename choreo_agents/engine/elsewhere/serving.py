"""An engine that computes for fronts elsewhere: it is given calls with the lineage of what it does not know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from choreo_agents.engine.calls import Decode
from choreo_agents.engine.elsewhere.pace import Pace, measured_pace
from choreo_agents.engine.elsewhere.parcels import packed, unpacked
from choreo_agents.engine.elsewhere.sending import (
    Copying,
    Greeted,
    Greeting,
    JoiningMessage,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
    own_version,
)
from choreo_agents.engine.lineage.exchange import LineageExchange
from choreo_agents.engine.lineage.rows import LineageRow
from choreo_agents.engine.messages.joining import Joining
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.messages.usage import Usage
from choreo_agents.engine.tenant import Tenant
from choreo_agents.engine.tenants import Tenants
from choreo_agents.errors import ChoreoError, EngineClosedError, EngineMismatchError, UnknownHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models.weightless import ServedModel, served_model
from choreo_agents.sampling import Chosen

K = TypeVar("K")
V = TypeVar("V")
_MOST_LATEST = 4096
_COUNTED_BY_THE_FRONT = frozenset({"finished", "cancelled", "failed"})


class EngineServer:
    """Of one engine, which serves fronts only. Used from one event loop (see `FarEngine`, which it is in one process).

    Args:
        tenants: The engine's.
        name: The engine's own.
        measures: Whether it measures how fast the engine is, once, before the first front is answered.
    """

    def __init__(self, tenants: Tenants, name: str, *, measures: bool = False) -> None:
        self.name = name
        self._tenants, self._core = tenants, tenants.core
        self._serving: dict[tuple[str, str], _Serving] = {}
        """By front and salt."""
        self._served: ServedModel | None = None
        self._pace: asyncio.Task[Pace] | None = None
        self._measures = measures
        self._told: WeakKeyDictionary[Tenant, dict[str, int]] = WeakKeyDictionary()
        """What was counted of each tenant and told to a front."""
        self._costs: WeakKeyDictionary[Message, Usage] = WeakKeyDictionary()
        """Of messages whose makers were told what they had cost."""
        self._closing: dict[str, asyncio.Future[None]] = {}
        """Done when a tenant is closed, by salt."""
        self._left = _Latest[tuple[str, int], None]()
        """Calls that their fronts left before they began or ended here, by front and stamp."""

    async def greet(self, greeting: Greeting) -> Greeted:
        """See `FarEngine`."""
        model = self._core.model.adapter.fingerprint
        if greeting.version != (own := own_version()):
            raise EngineMismatchError(
                f"engine {self.name!r} runs choreo-agents {own}, and its front {greeting.version}: install "
                "one version on all machines"
            )
        if greeting.model not in ("", model):
            raise EngineMismatchError(
                f"engine {self.name!r} serves {model!r}, and the others {greeting.model!r}: engines of one front have "
                "one model, in one dtype"
            )
        if greeting.default not in (None, own := self._core.adapters.default_key):
            raise EngineMismatchError(
                f"engine {self.name!r} runs calls that name no adapter with {own or 'none'!r}, and its front takes it "
                f"to be {greeting.default or 'none'!r}: load all with the same adapter"
            )
        if greeting.mapped_storage not in (None, self._core.settings.memory.mapped_storage):
            raise EngineMismatchError(
                f"engine {self.name!r} keeps mapped copies as {self._core.settings.memory.mapped_storage!r}, and the "
                f"others as {greeting.mapped_storage!r}: give all the same Memory(mapped_storage=...)"
            )
        if not self._core.method.keeps_kv:
            raise EngineMismatchError(
                f"engine {self.name!r} keeps text only, and is of no use to others: load it with method='choreo'"
            )
        with self._core.lock:
            mine = {salt: each for (front, salt), each in self._serving.items() if front == greeting.front}
            held = {salt: each.held() for salt, each in mine.items()}
        settings = self._core.settings
        if self._served is None:
            self._served = await asyncio.to_thread(served_model, self._core.model)
        room = (self._core.pool.total_tokens, self._core.kv_budget_bytes, settings.scheduling.rows)
        return Greeted(self._served, *room, settings.memory.mapped_storage, held, await self._measured())

    async def _measured(self) -> Pace | None:
        """How fast the engine is; measured once, or again if that has failed."""
        if not self._measures:
            return None
        if self._pace is None:
            self._pace = asyncio.create_task(asyncio.to_thread(measured_pace, self._tenants))
        try:
            return await asyncio.shield(measuring := self._pace)
        except Exception:
            if self._pace is measuring:
                self._pace = None
            raise

    @property
    def has_ended(self) -> bool:
        """Whether its engine computes no more, though nobody has closed it."""
        try:
            self._core.loop.require_open()
        except ChoreoError as error:
            return not isinstance(error, EngineClosedError)
        return False

    async def load_adapter(self, adapter: SentAdapter) -> None:
        """See `FarEngine`."""
        tenant = (await self._serving_of(adapter.front, adapter.salt)).tenant
        await asyncio.to_thread(_load, tenant, adapter)

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[Chosen] | SentAnswer]:
        """See `FarEngine`."""
        serving = await self._serving_of(sent.front, sent.salt)
        if self._was_left(sent):
            return
        read = [*(parent.id for parent in sent.call.parents), *(each for each, _ in sent.joins)]
        serving.take_in(read, sent.rows, sent.promised, sent.stamp)
        call = sent.call
        if sent.grows and isinstance(call, Decode):
            call = replace(call, joining=serving.begin_joining(sent.number, sent.joins))
        arrived = asyncio.Queue[Chosen | None]()
        loop = asyncio.get_running_loop()

        def put(chosen: Chosen | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chosen)

        on_token = put if isinstance(call, Decode) else None
        calls: Any = [call]
        [answer] = serving.tenant.submit(calls, serving.scope, on_token=on_token)
        serving.answers[sent.number] = answer
        answer.add_done_callback(lambda _: put(None))
        try:
            with serving.tenant.given_up_if_left([answer], serving.scope):
                yield ()
                ended = False
                while not ended:
                    found = [await arrived.get()]
                    while not arrived.empty():
                        found.append(arrived.get_nowait())
                    ended = found[-1] is None
                    if told := tuple(chosen for chosen in found if chosen is not None):
                        yield told
                handle = answer.result()
            serving.made(handle, sent.stamp)
            if self._was_left(sent):
                serving.leave(sent.stamp)
                return
            yield self._answer(serving, handle, sent)
        finally:
            serving.forget(sent.number)

    async def hurry(self, front: str, number: int, priority: int) -> None:
        """See `FarEngine`."""
        for (whose, _), serving in self._serving.items():
            if whose == front and (answer := serving.answers.get(number)) is not None:
                with self._core.lock:
                    for request in self._core.loop.requests_of(serving.tenant.name):
                        if answer in request.futures:
                            self._core.loop.hurry(request, priority)

    async def join(self, joining: JoiningMessage) -> None:
        """See `FarEngine`."""
        serving = await self._serving_of(joining.front, joining.salt)
        serving.take_in([joining.id], joining.rows, joining.promised, joining.stamp)
        serving.join(joining.number, joining.id, joining.offset)

    async def give(self, copying: Copying) -> Any:
        """See `FarEngine`."""
        serving = await self._serving_of(copying.front, copying.salt)
        return await asyncio.to_thread(packed, serving.tenant, copying.ids)

    async def take(self, copying: Copying, given: Any) -> tuple[Collection[str], int]:
        """See `FarEngine`."""
        serving = await self._serving_of(copying.front, copying.salt)
        taken: dict[str, int] = {}
        try:
            serving.take_in(copying.ids, copying.rows, {}, copying.stamp)
            refused = await asyncio.to_thread(unpacked, serving.tenant, given)
            taken = {parcel.id: parcel.nbytes for parcel in given if parcel.id not in refused}
        finally:
            serving.release([each for each in copying.ids if each not in taken], copying.stamp)
        return list(taken), sum(taken.values())

    async def release(self, releasing: Releasing) -> None:
        """See `FarEngine`."""
        serving = self._serving.get((releasing.front, releasing.salt))
        for stamp in releasing.left:
            if serving is None or not serving.leave(stamp):
                self._left[releasing.front, stamp] = None
        if serving is not None:
            serving.release(releasing.ids, releasing.stamp)

    async def close_tenant(self, front: str, salt: str, stamp: int) -> None:
        """See `FarEngine`."""
        serving = self._serving.get((front, salt))
        if serving is None:
            return
        if serving.latest > stamp:  # it was begun again, and that came before this
            serving.release(serving.needed(), stamp)
            return
        del self._serving[front, salt]
        self._core.close_scope(serving.scope)
        if all(other.tenant is not serving.tenant for other in self._serving.values()):
            closed = self._closing[salt] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.shield(asyncio.to_thread(self._tenants.close, serving.tenant))
            finally:
                del self._closing[salt]
                closed.set_result(None)

    def serves(self, front: str, salt: str) -> bool:
        """Whether it has something of a front's tenant."""
        return (front, salt) in self._serving

    async def _serving_of(self, front: str, salt: str) -> _Serving:
        while (closing := self._closing.get(salt)) is not None:
            await asyncio.shield(closing)
        known = self._serving.get((front, salt))
        if known is None or known.tenant.closed:
            known = self._serving[front, salt] = _Serving(self._tenants.open(salt, None))
        return known

    def _was_left(self, sent: SentCall) -> bool:
        """Whether the front has left a call already; asked once when it begins, and once when it has ended."""
        return (sent.front, sent.stamp) in self._left

    def _answer(self, serving: _Serving, handle: MessageHandle, sent: SentCall) -> SentAnswer:
        """What was made, and what it has cost: what another call was told of is there already."""
        message = serving.tenant.find(handle)
        seen = zip(message.parents, message.relative_offsets, message.since, strict=True)
        views = [(parent.handle.id, message.native_offset + offset, since) for parent, offset, since in seen]
        with self._core.lock:
            counted = asdict(self._core.counters.so_far(serving.tenant.name))
        told = self._told.setdefault(serving.tenant, {})
        if any(counted[name] < amount for name, amount in told.items()):
            told.clear()  # the engine has begun to count anew
        delta = {name: counted[name] - told.get(name, 0) for name in counted if name not in _COUNTED_BY_THE_FRONT}
        told.update(counted)
        answer = SentAnswer(
            handle.id,
            message.tokens,
            message.chosen,
            message.finish_reason,
            Usage.found(len(message.tokens)) if self._costs.get(message) is message.usage else message.usage,
            tuple(views[len(sent.call.parents) :]),
            {name: amount for name, amount in delta.items() if amount},
        )
        self._costs[message] = message.usage
        return answer


def _load(tenant: Tenant, adapter: SentAdapter) -> None:
    with TemporaryDirectory() as folder:
        for name, data in adapter.files.items():
            (Path(folder) / name).write_bytes(data)
        tenant.load_adapter(folder, adapter.name)


class _Latest(dict[K, V]):
    """The latest entries of many: what came long ago is asked for no longer."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST_LATEST:
            del self[next(iter(self))]


class _Serving:
    """One tenant's messages here, of one front."""

    def __init__(self, tenant: Tenant) -> None:
        self._core, self.tenant = tenant.core, tenant
        self.scope = Scope(None)
        self.answers: dict[int, Any] = {}
        """Of calls under way, by number."""
        self.latest = -1
        """Stamp of the last that was sent for it."""
        self._joinings: dict[int, tuple[Joining, set[tuple[str, int]]]] = {}
        """Of calls under way that others join, by number: with what has joined each, and where."""
        self._early = _Latest[int, list[tuple[str, int]]]()
        """What is to join calls that are not here yet, by number."""
        self._ended = _Latest[int, None]()
        """Numbers of calls that are not here any more."""
        self._made = _Latest[int, str]()
        """What calls of late have made that nobody had needed before, by their stamps."""
        self._needed: dict[str, int] = {}
        """When the front said last that it needs a message."""
        self._lineage = LineageExchange(tenant)

    def take_in(
        self, read: Collection[str], sent_rows: Sequence[LineageRow], promised: Mapping[str, bool], stamp: int
    ) -> None:
        """Know what a call reads; raises `UnknownHandleError` if something is not there, and did not come with it."""
        rows = {row.id: row for row in sent_rows}
        with self._core.lock:
            table = self._core.table
            self.latest = max(stamp, self.latest)
            for each in read:
                self._needed[each] = max(stamp, self._needed.get(each, stamp))
            new = [each for each in rows if table.known(each) is None]
            refused = self._lineage.take_in([each for each in read if each in rows], rows, {}, {}, self.scope)
            for each in new:
                message = table.known(each)
                if message is not None and each in promised:
                    message.promise, message.again = self._core.next_number(), promised[each]
        if refused:
            raise UnknownHandleError("; ".join(f"{name}: {why}" for name, why in refused.items()))

    def held(self) -> list[str]:
        """Ids of what is leased here. Under the engine's lock."""
        return [message.handle.id for message in self._core.table.held_in(self.scope)]

    def handle(self, message_id: str) -> MessageHandle:
        """Of a leased message."""
        with self._core.lock:
            message = self._core.table.get(message_id)
        if message is None:
            raise UnknownHandleError(f"message {message_id!r} was released")
        return message.handle

    def begin_joining(self, number: int, joins: Sequence[tuple[str, int]]) -> Joining:
        """What brings messages into a call's view: these at once, those that came before it, and others later."""
        self._ended.pop(number, None)
        joining = self.tenant.joining()
        self._joinings[number] = (joining, set())
        for message_id, offset in [*joins, *self._early.pop(number, [])]:
            self.join(number, message_id, offset)
        return joining

    def join(self, number: int, message_id: str, offset: int) -> None:
        """Let a message come into a call's view, once."""
        if number in self._joinings:
            joining, seen = self._joinings[number]
            if (message_id, offset) not in seen:
                handle = self.handle(message_id)  # if it is not here, it comes once more
                seen.add((message_id, offset))
                joining.add(handle, offset)
        elif number not in self._ended:
            self._early[number] = [*self._early.get(number, []), (message_id, offset)]

    def forget(self, number: int) -> None:
        """A call has ended."""
        self.answers.pop(number, None)
        if self._joinings.pop(number, None) is not None:
            self._ended[number] = None

    def made(self, handle: MessageHandle, stamp: int) -> None:
        """The front needs what a call has made."""
        with self._core.lock:
            if handle.id not in self._needed:
                self._made[stamp] = handle.id
            self._needed[handle.id] = max(stamp, self._needed.get(handle.id, stamp))

    def leave(self, stamp: int) -> bool:
        """The front has left a call without an answer: whether it had ended here. What it alone has made goes."""
        if (made := self._made.pop(stamp, None)) is None:
            return False
        self.release([made], stamp)
        return True

    def needed(self) -> list[str]:
        """Ids of what the front needs."""
        with self._core.lock:
            return list(self._needed)

    def release(self, ids: Collection[str], stamp: int) -> None:
        """Drop the front's leases of these, unless it has said later that it needs them."""
        with self._core.lock:
            for each in ids:
                if self._needed.get(each, stamp) > stamp:
                    continue
                self._needed.pop(each, None)
                message = self._core.table.get(each)
                while message is not None and message.scoped[self.scope]:
                    self._core.table.release(message, self.scope)
