"""An engine that computes for fronts elsewhere: it is given calls with the lineage of what it does not know."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Collection
from dataclasses import asdict

from choreo_agents.engine.calls import Decode
from choreo_agents.engine.core import EngineCore
from choreo_agents.engine.elsewhere.sending import Greeting, SentAnswer, SentCall
from choreo_agents.engine.lineage.exchange import LineageExchange
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.engine.tenant import Tenant
from choreo_agents.engine.tenants import Tenants
from choreo_agents.errors import InvalidRequestError, UnknownHandleError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.sampling import Chosen

_COUNTED_BY_THE_FRONT = frozenset({"finished", "cancelled", "failed"})


class EngineServer:
    """Of one engine, which serves this front alone. Used from one event loop.

    Args:
        tenants: The engine's.
        name: Its own.
    """

    def __init__(self, tenants: Tenants, name: str = "engine") -> None:
        self.name = name
        self._tenants, self._core = tenants, tenants.core
        self._serving: dict[str, _Serving] = {}
        """By salt."""

    async def greet(self, greeting: Greeting) -> int:
        """See `FarEngine`."""
        model = self._core.model.adapter.fingerprint
        if model != greeting.model:
            raise InvalidRequestError(
                f"engine {self.name!r} serves {model!r}, and the others {greeting.model!r}: engines of one front have "
                "one model, in one dtype"
            )
        self._core.secret = greeting.secret
        return self._core.pool.total_tokens

    async def run(self, sent: SentCall) -> AsyncGenerator[Chosen | SentAnswer]:
        """See `FarEngine`."""
        serving = self._serving_of(sent.salt)
        serving.take_in(sent)
        arrived = asyncio.Queue[Chosen | None]()
        loop = asyncio.get_running_loop()

        def put(chosen: Chosen | None) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chosen)

        on_token = put if isinstance(sent.call, Decode) else None
        [answer] = serving.tenant.submit([sent.call], serving.scope, on_token=on_token)  # type: ignore[arg-type]
        answer.add_done_callback(lambda _: put(None))
        with serving.tenant.given_up_if_left([answer], serving.scope):
            while (chosen := await arrived.get()) is not None:
                yield chosen
            handle = answer.result()
        yield serving.answer(handle, sent)

    async def hurry(self, number: int, priority: int) -> None:
        """See `FarEngine`."""

    async def release(self, salt: str, ids: Collection[str]) -> None:
        """See `FarEngine`."""
        if (serving := self._serving.get(salt)) is not None:
            serving.release(ids)

    def _serving_of(self, salt: str) -> _Serving:
        if salt not in self._serving:
            self._serving[salt] = _Serving(self._core, self._tenants.open(salt, None))
        return self._serving[salt]


class _Serving:
    """One tenant's messages here."""

    def __init__(self, core: EngineCore, tenant: Tenant) -> None:
        self._core, self.tenant = core, tenant
        self.scope = Scope(None)
        self._lineage = LineageExchange(tenant)
        self._told = asdict(core.counters.so_far(tenant.name))

    def take_in(self, sent: SentCall) -> None:
        """Know what the call reads; raises `UnknownHandleError` if something is not there, and did not come with it."""
        rows = {row.id: row for row in sent.rows}
        with self._core.lock:
            table = self._core.table
            new = [each for each in rows if table.known(each) is None]
            read = [parent.id for parent in sent.call.parents if parent.id in rows]
            refused = self._lineage.take_in(read, rows, {}, {}, self.scope)
            for each in new:
                message = table.known(each)
                if message is not None and each in sent.promised:
                    message.promise = self._core.next_number()
        if refused:
            raise UnknownHandleError("; ".join(f"{name}: {why}" for name, why in refused.items()))

    def answer(self, handle: MessageHandle, sent: SentCall) -> SentAnswer:
        """What was made, and what it has cost."""
        message = self.tenant.find(handle)
        seen = zip(message.parents, message.relative_offsets, message.since, strict=True)
        views = [(parent.handle.id, message.native_offset + offset, since) for parent, offset, since in seen]
        counted = asdict(self._core.counters.so_far(self.tenant.name))
        delta = {name: counted[name] - self._told[name] for name in counted if name not in _COUNTED_BY_THE_FRONT}
        self._told = counted
        return SentAnswer(
            handle.id,
            message.tokens,
            message.chosen,
            message.finish_reason,
            message.usage,
            tuple(views[len(sent.call.parents) :]),
            {name: amount for name, amount in delta.items() if amount},
        )

    def release(self, ids: Collection[str]) -> None:
        """Drop the front's leases of these."""
        with self._core.lock:
            for each in ids:
                message = self._core.table.get(each)
                while message is not None and message.scoped[self.scope]:
                    self._core.table.release(message, self.scope)
