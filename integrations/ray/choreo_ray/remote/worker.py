"""Worker that computes for routers: it gets calls with the lineage of the messages that it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

from choreo_agents import Decode, Engine, MessageHandle, Usage
from choreo_agents.engine.delegation import Message, ServedModel
from choreo_agents.errors import ChoreoError, EngineClosedError, EngineMismatchError
from choreo_agents.sampling import SampledToken
from choreo_ray.remote.protocol import (
    Copying,
    Hello,
    HelloReply,
    Releasing,
    SentAdapter,
    SentAnswer,
    SentCall,
    own_version,
)
from choreo_ray.remote.worker_tenant import Latest, Serving

_COUNTED_BY_ROUTER = frozenset({"finished", "cancelled", "failed"})


class EngineWorker:
    """Worker by which one engine computes for routers only. Used from one event loop.

    It is itself an `EngineClient`, for a router in the same process.

    Args:
        engine: The engine, as `Engine.load` returned it.
        name: Name of the engine.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        assert engine.admin is not None, "it was loaded, and is no tenant's"
        self.name, self._engine, self._core = name, engine, engine.admin.core
        self._serving: dict[tuple[str, str], Serving] = {}
        """State of each tenant of a router, by router and salt."""
        self._served: ServedModel | None = None
        self._reported = WeakKeyDictionary[object, dict[str, int]]()
        """Values of each tenant's counters when a router was last told of them, by salt."""
        self._costs: WeakKeyDictionary[Message, Usage] = WeakKeyDictionary()
        """Usage of messages that was already reported with an answer."""
        self._closing: dict[str, asyncio.Future[None]] = {}
        """Done when a tenant is closed, by salt."""
        self._left = Latest[tuple[str, int], None]()
        """Calls that their routers left before they began or ended here, by router and sequence number."""

    async def greet(self, greeting: Hello) -> HelloReply:
        """See `EngineClient`."""
        model = self._core.model.adapter.fingerprint
        if greeting.version != (own := own_version()):
            raise EngineMismatchError(
                f"engine {self.name!r} runs {own}, but its router {greeting.version}: install the same version on all "
                "machines"
            )
        if greeting.model not in ("", model):
            raise EngineMismatchError(
                f"engine {self.name!r} serves {model!r}, but the others {greeting.model!r}: engines of one router need "
                "the same model and dtype"
            )
        if greeting.default not in (None, own := self._core.adapters.default_key):
            raise EngineMismatchError(
                f"engine {self.name!r} uses the adapter {own or 'none'!r} by default, but its router expects "
                f"{greeting.default or 'none'!r}: load all with the same adapter"
            )
        if not self._core.method.keeps_kv:
            raise EngineMismatchError(
                f"engine {self.name!r} has a method without KV, which others cannot reuse: load it with method='choreo'"
            )
        with self._core.lock:
            served = {salt: tenant for (router, salt), tenant in self._serving.items() if router == greeting.router}
            held_ids = {salt: tenant.held() for salt, tenant in served.items()}
        if self._served is None:
            self._served = await asyncio.to_thread(ServedModel.of, self._core.model)
        return HelloReply(self._served, self._core.pool.total_tokens, self._core.kv_budget_bytes, held_ids)

    @property
    def has_ended(self) -> bool:
        """True if the engine computes no more, though nobody has closed it."""
        try:
            self._core.loop.require_open()
        except ChoreoError as error:
            return not isinstance(error, EngineClosedError)
        return False

    async def load_adapter(self, adapter: SentAdapter) -> None:
        """See `EngineClient`."""
        serving = await self._serving_of(adapter.router, adapter.salt)
        await asyncio.to_thread(_load, serving.engine, adapter)

    async def run(self, sent: SentCall) -> AsyncGenerator[Sequence[SampledToken] | SentAnswer]:
        """See `EngineClient`."""
        serving = await self._serving_of(sent.router, sent.salt)
        if self._was_left(sent):
            return
        call = sent.call
        serving.take_in([parent.id for parent in call.parents], sent.rows, sent.promised, sent.sequence_no)
        arrived = asyncio.Queue[SampledToken | None]()
        loop = asyncio.get_running_loop()

        def put(chosen: SampledToken | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chosen)

        on_token = put if isinstance(call, Decode) else None
        calls: Any = [call]
        [answer] = serving.tenant.submit(calls, serving.scope, on_token=on_token)
        serving.answers[sent.number] = answer
        answer.add_done_callback(lambda _: put(None))
        try:
            with serving.tenant.cancel_on_error([answer], serving.scope):
                yield ()
                ended = False
                while not ended:
                    arrivals = [await arrived.get()]
                    while not arrived.empty():
                        arrivals.append(arrived.get_nowait())
                    ended = arrivals[-1] is None
                    if tokens := tuple(chosen for chosen in arrivals if chosen is not None):
                        yield tokens
                handle = answer.result()
            serving.note_made(handle, sent.sequence_no)
            if self._was_left(sent):
                serving.leave(sent.sequence_no)
                return
            yield self._answer(serving, handle, sent)
        finally:
            serving.answers.pop(sent.number, None)

    async def raise_priority(self, router: str, number: int, priority: int) -> None:
        """See `EngineClient`."""
        for (owner, _), serving in self._serving.items():
            if owner == router and (answer := serving.answers.get(number)) is not None:
                with self._core.lock:
                    for request in self._core.loop.requests_of(serving.tenant.name):
                        if answer in request.futures:
                            self._core.loop.raise_priority(request, priority)

    async def export_kv(self, copying: Copying) -> Any:
        """See `EngineClient`."""
        serving = await self._serving_of(copying.router, copying.salt)
        return await asyncio.to_thread(serving.engine.lineage.export_packets, copying.ids)

    async def import_kv(self, copying: Copying, exported: Any) -> tuple[Collection[str], int]:
        """See `EngineClient`."""
        serving = await self._serving_of(copying.router, copying.salt)
        taken: dict[str, int] = {}
        try:
            serving.take_in(copying.ids, copying.rows, {}, copying.sequence_no)
            refused = await asyncio.to_thread(serving.engine.lineage.import_packets, exported)
            taken = {packet.id: packet.nbytes for packet in exported if packet.id not in refused}
        finally:
            serving.release([message_id for message_id in copying.ids if message_id not in taken], copying.sequence_no)
        return list(taken), sum(taken.values())

    async def release(self, releasing: Releasing) -> None:
        """See `EngineClient`."""
        serving = self._serving.get((releasing.router, releasing.salt))
        for sequence_no in releasing.left:
            if serving is None or not serving.leave(sequence_no):
                self._left[releasing.router, sequence_no] = None
        if serving is not None:
            serving.release(releasing.ids, releasing.sequence_no)

    async def close_tenant(self, router: str, salt: str, sequence_no: int) -> None:
        """See `EngineClient`."""
        serving = self._serving.get((router, salt))
        if serving is None:
            return
        if serving.latest > sequence_no:  # the tenant was opened again, and that message has overtaken this one
            serving.release(serving.needed(), sequence_no)
            return
        del self._serving[router, salt]
        self._core.close_scope(serving.scope)
        if all(remaining.tenant is not serving.tenant for remaining in self._serving.values()):
            closed = self._closing[salt] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.shield(asyncio.to_thread(serving.engine.close))
            finally:
                del self._closing[salt]
                closed.set_result(None)

    def serves(self, router: str, salt: str) -> bool:
        """Return whether it has something of a router's tenant."""
        return (router, salt) in self._serving

    async def _serving_of(self, router: str, salt: str) -> Serving:
        while (closing := self._closing.get(salt)) is not None:
            await asyncio.shield(closing)
        serving = self._serving.get((router, salt))
        if serving is None or serving.tenant.closed:
            serving = self._serving[router, salt] = Serving(self._engine, salt)
        return serving

    def _was_left(self, sent: SentCall) -> bool:
        """Return whether the router has left a call; checked when the call begins, and when it has ended."""
        return (sent.router, sent.sequence_no) in self._left

    def _answer(self, serving: Serving, handle: MessageHandle, sent: SentCall) -> SentAnswer:
        """Return what a call has made and cost. A cost that another answer has reported is not reported again."""
        message = serving.tenant.find(handle)
        with self._core.lock:
            counted = asdict(self._core.counters.so_far(serving.tenant.name))
        reported = self._reported.setdefault(serving.tenant, {})
        if any(counted[name] < amount for name, amount in reported.items()):
            reported.clear()  # the engine's counters were reset
        delta = {name: counted[name] - reported.get(name, 0) for name in counted if name not in _COUNTED_BY_ROUTER}
        reported.update(counted)
        answer = SentAnswer(
            handle.id,
            message.tokens,
            message.chosen,
            message.finish_reason,
            Usage.of_existing(len(message.tokens)) if self._costs.get(message) is message.usage else message.usage,
            {name: amount for name, amount in delta.items() if amount},
        )
        self._costs[message] = message.usage
        return answer


def _load(engine: Engine, adapter: SentAdapter) -> None:
    with TemporaryDirectory() as folder:
        for name, data in adapter.files.items():
            (Path(folder) / name).write_bytes(data)
        engine.load_adapter(folder, adapter.name)
