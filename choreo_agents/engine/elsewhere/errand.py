"""What is done for one request: it is placed, what its engine lacks is brought there, and the tokens come back."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from choreo_agents.engine.calls import Prefill
from choreo_agents.engine.elsewhere.fleet import Fleet, Outpost, Wish
from choreo_agents.engine.elsewhere.method import ElsewhereEncoding
from choreo_agents.engine.elsewhere.routing import Route
from choreo_agents.engine.elsewhere.sending import (
    Copying,
    FarEngine,
    Greeting,
    JoiningMessage,
    SentAnswer,
    SentCall,
    rows_of,
    sent,
)
from choreo_agents.engine.messages.message import Message
from choreo_agents.engine.messages.table import MessageTable
from choreo_agents.engine.pending import Pending
from choreo_agents.errors import ChoreoError, EngineLostError, EngineMismatchError, UnknownHandleError
from choreo_agents.runtime.counters import Counters
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.request import Request
from choreo_agents.sampling import Chosen
from choreo_agents.tracing import CallPlaced, EngineCame, EngineWent, EventSink, FirstToken, Ledger, guarded

if TYPE_CHECKING:
    from choreo_agents.engine.elsewhere.loop import ElsewhereLoop

MOST_LOSSES = 2
"""Engines that a call may be lost with."""
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 30.0
"""Seconds after which an engine that is gone is asked whether it is back: at first, and at last."""


class Errands:
    """Runs in the loop's thread; bookkeeping is under the lock.

    Args:
        fleet: The engines.
        table: Has the messages.
        counters: Count what is done elsewhere, too.
        greeting: Of the front.
        lock: Guards all bookkeeping.
        sink: Receives events.
        patience_s: Seconds that calls wait while no engine is there.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: MessageTable,
        counters: Ledger[Counters],
        greeting: Greeting,
        lock: EngineLock,
        sink: EventSink,
        patience_s: float,
    ) -> None:
        self._fleet, self._table, self._counters, self._greeting = fleet, table, counters, greeting
        self._lock, self._emit, self._patience_s = lock, guarded(sink), patience_s
        self._loop: ElsewhereLoop
        self._at: dict[int, Outpost] = {}
        """Where each request runs."""
        self._copying: dict[tuple[str, str], asyncio.Future[None]] = {}
        """Done when a message's copy has come to an engine, or will not."""
        self._there = asyncio.Event()
        """Set while there is an engine to send calls to."""

    def attach(self, loop: ElsewhereLoop) -> None:
        """The loop that runs them."""
        self._loop = loop

    async def greet(self) -> int:
        """Be known to all engines; tokens of KV that each of them has room for at least."""
        outposts = list(self._fleet.outposts.values())
        for outpost in outposts:
            await self._loop.greet(outpost.engine, self._greeting)
            self._emit(EngineCame(time.perf_counter(), outpost.name))
        self._there.set()
        return min(outpost.total_tokens for outpost in outposts)

    async def prepare(self, requests: Sequence[Request]) -> None:
        """Find out what has to be known before requests are placed."""

    def errand(self, request: Request) -> Coroutine[Any, Any, None]:
        """What is to be done for a request, which is placed now. Under the lock."""
        return self._run(request, self._place(request, ()))

    async def hurry(self, request: Request) -> None:
        """Tell a request's engine of its priority."""
        with self._lock:
            outpost = self._at.get(request.number)
        if outpost is not None:
            await _reached(outpost.engine.hurry(self._greeting.front, request.number, request.priority))

    def forget(self, message_id: str) -> None:
        """The front has dropped a message: who holds it may, too. Under the lock."""
        by_engine: dict[FarEngine, str] = dict(self._fleet.dropped(message_id))
        for engine, salt in by_engine.items():
            release = engine.release(self._greeting.front, salt, [message_id])
            self._loop.soon(lambda release=release: self._loop.spawn(_reached(release)))

    async def leave(self) -> None:
        """Give back all that engines hold for the front."""
        with self._lock:
            held = {(each.engine, salt) for each in self._fleet.alive() for salt in each.held.values()}
        away = (_reached(engine.close_tenant(self._greeting.front, salt)) for engine, salt in held)
        await asyncio.wait_for(asyncio.gather(*away), self._patience_s)

    def _place(self, request: Request, lost: Sequence[str]) -> Route | None:
        """Find a request its engine, and begin the copies that it waits for there."""
        pending = _pending(request)
        call = pending.placed.read.call
        name = pending.name if isinstance(call, Prefill) else None
        thread = next((s for scope in pending.scopes.values() if scope for s in scope.chain() if s.is_threads), None)
        found = self._fleet.place(Wish(request.number, pending.lineage, call, name, thread), lost)
        if found is not None:
            self._at[request.number] = self._fleet.outposts[found.engine]
            why = (found.bytes_copied, found.tokens_encoded, found.expected_s)
            self._emit(CallPlaced(time.perf_counter(), request.number, found.engine, *why))
        return found

    async def _run(self, request: Request, placed: Route | None) -> None:
        lost: list[str] = []
        while True:
            if placed is None:
                await self._engine_there()
                with self._lock:
                    if request.over:
                        return
                    placed = self._place(request, lost)
                continue
            outpost = self._fleet.outposts[placed.engine]
            try:
                await self._bring(request, placed, outpost)
                await self._run_at(request, outpost)
                return
            except EngineLostError as cause:
                lost.append(outpost.name)
                self._gone(outpost, cause)
                if len(lost) >= MOST_LOSSES:
                    raise _deadly(request, lost) from cause
                placed = None
            finally:
                with self._lock:
                    self._fleet.ended(outpost.name, request.number)
                    self._at.pop(request.number, None)

    async def _engine_there(self) -> None:
        try:
            await asyncio.wait_for(self._there.wait(), self._patience_s)
        except TimeoutError:
            names = ", ".join(map(repr, self._fleet.outposts))
            raise EngineLostError(
                f"none of the engines {names} has answered for {self._patience_s:g} s: see why they end, and call again"
            ) from None

    async def _bring(self, request: Request, placed: Route, outpost: Outpost) -> None:
        """Have what is copied for a request where it runs; what does not come is encoded again there."""
        salt = _pending(request).naming.salt
        by_source: dict[str, list[Message]] = defaultdict(list)
        waits: list[asyncio.Future[None]] = []
        begun: dict[tuple[str, str], asyncio.Future[None]] = {}
        with self._lock:
            if request.over:
                return
            parents = {parent.handle.id: parent for parent in _pending(request).lineage.parents}
            for message_id, source in placed.copies.items():
                key = (outpost.name, message_id)
                if (coming := self._copying.get(key)) is not None:
                    waits.append(coming)
                elif message_id in parents and message_id not in outpost.held:
                    by_source[source].append(parents[message_id])
                    begun[key] = self._copying[key] = asyncio.get_running_loop().create_future()
            copyings = {source: self._copying_of(salt, messages, outpost) for source, messages in by_source.items()}
        try:
            for source, copying in copyings.items():
                await self._copy(self._fleet.outposts[source], outpost, copying)
        finally:
            with self._lock:
                self._fleet.arrived(outpost.name, placed.bytes_copied)
                for key, coming in begun.items():
                    del self._copying[key]
                    coming.set_result(None)
        for coming in waits:
            await coming

    def _copying_of(self, salt: str, messages: Sequence[Message], outpost: Outpost) -> Copying:
        rows, _ = rows_of(messages, outpost.held)
        return Copying(self._greeting.front, salt, tuple(each.handle.id for each in messages), rows)

    async def _copy(self, source: Outpost, outpost: Outpost, copying: Copying) -> None:
        try:
            given = await source.engine.give(copying)
        except EngineLostError as cause:
            self._gone(source, cause)
            return
        taken, _ = await outpost.engine.take(copying, given)
        with self._lock:
            self._fleet.holds(outpost.name, dict.fromkeys(taken, copying.salt))

    async def _run_at(self, request: Request, outpost: Outpost) -> None:
        with self._lock:
            if request.over:
                return
            call = self._sent(request, outpost)
            request.binding = _encoding(request).bind()
            self._let_join(request, outpost)
        try:
            await self._hear(request, outpost, call)
        except UnknownHandleError:
            # It was released there while the front asked for it again: now all of it is sent.
            with self._lock:
                for parent in call.call.parents:
                    outpost.held.pop(parent.id, None)
                call = self._sent(request, outpost)
            await self._hear(request, outpost, call)

    def _sent(self, request: Request, outpost: Outpost) -> SentCall:
        pending = _pending(request)
        seed = None if request.decoding is None else request.decoding.seed
        delivered = [chosen.token for chosen in request.chosen]
        held = outpost.held
        made = sent(
            self._greeting.front, request.number, pending.naming.salt, pending.placed, seed, held.keys(), delivered
        )
        # From now on the engine leases what the call reads, whatever becomes of the call.
        self._fleet.holds(outpost.name, {parent.id: pending.naming.salt for parent in made.call.parents})
        return made

    def _let_join(self, request: Request, outpost: Outpost) -> None:
        late, salt = _encoding(request).late, _pending(request).naming.salt

        def join(parent: Message, offset: int) -> None:
            rows, promised = rows_of([parent], outpost.held.keys())
            self._fleet.holds(outpost.name, {parent.handle.id: salt})
            joining = JoiningMessage(
                self._greeting.front, request.number, salt, parent.handle.id, offset, rows, promised
            )
            self._loop.soon(lambda: self._loop.spawn(_reached(outpost.engine.join(joining))))

        late.on_added = join
        for parent, offset in late.added:
            join(parent, offset)

    async def _hear(self, request: Request, outpost: Outpost, call: SentCall) -> None:
        before = len(request.chosen)
        async with aclosing(outpost.engine.run(call)) as told:
            async for each in told:
                with self._lock:
                    if request.over:
                        return
                    if isinstance(each, SentAnswer):
                        self._finish(request, each, outpost, call)
                        return
                    repeated, before = each[:before], max(0, before - len(each))
                    self._take(request, each[len(repeated) :], outpost)
        raise EngineLostError(f"engine {outpost.name!r} has ended a call without an answer")

    def _take(self, request: Request, told: Iterable[Chosen], outpost: Outpost) -> None:
        for chosen in told:
            if request.first_token_s is None:
                request.first_token_s = now = time.perf_counter()
                self._emit(FirstToken(now, request.number, now - request.submitted_s))
                self._fleet.encoded(outpost.name, request.number)
            request.chosen.append(chosen)
            for listener in request.listeners:
                listener(chosen)

    def _finish(self, request: Request, answer: SentAnswer, outpost: Outpost, call: SentCall) -> None:
        pending = _pending(request)
        self._fleet.holds(outpost.name, {answer.id: pending.naming.salt})
        if request.decoding is not None:
            request.chosen = list(answer.chosen or ())
            request.decoding.cut = answer.finish_reason == "length"
        self._fleet.ended(outpost.name, request.number, call.call, len(answer.chosen or ()))
        usage, charges = answer.usage, request.charges
        charges.encoded, charges.recomputed = usage.tokens_encoded, usage.tokens_recomputed
        charges.mapped, charges.foreign = usage.tokens_mapped, usage.tokens_of_other_models
        request.beyond_elsewhere, request.reused_elsewhere = usage.tokens_beyond, usage.tokens_reused
        request.tokens = list(answer.tokens)
        _encoding(request).late.end(answer.joined)
        for name, amount in answer.counted.items():
            if name != "tokens_reused":
                self._counters.add(request.tenant, name, amount)
        for message_id in call.promised:
            if (message := self._table.known(message_id)) is not None:
                message.promise = None
        self._loop.finish(request)
        made = self._table.get(answer.id)
        if made is None:
            self.forget(answer.id)
        else:
            self._table.entry(made)

    def _gone(self, outpost: Outpost, cause: EngineLostError) -> None:
        """An engine is gone: what it had is computed again where it is read, and it is asked to come back."""
        with self._lock:
            if not outpost.alive:
                return
            self._fleet.lost(outpost.name)
            if not self._fleet.alive():
                self._there.clear()
        self._emit(EngineWent(time.perf_counter(), outpost.name, str(cause)))
        self._loop.spawn(self._revive(outpost))

    async def _revive(self, outpost: Outpost) -> None:
        wait_s = _BACKOFF_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_BACKOFF_S)
            try:
                await self._loop.greet(outpost.engine, self._greeting)
            except EngineLostError:
                continue
            except EngineMismatchError:
                return  # it is another now: nothing can be sent to it
            self._emit(EngineCame(time.perf_counter(), outpost.name))
            self._there.set()
            return


def _pending(request: Request) -> Pending:
    owner = request.owner
    assert isinstance(owner, Pending)
    return owner


def _encoding(request: Request) -> ElsewhereEncoding:
    encoding = request.encoding
    assert isinstance(encoding, ElsewhereEncoding)
    return encoding


async def _reached(work: Coroutine[Any, Any, Any]) -> None:
    """Do what an engine that is gone, or has forgotten what it is about, need not do any more."""
    with suppress(ChoreoError):
        await work


def _deadly(request: Request, lost: Sequence[str]) -> EngineLostError:
    what = f"{request.kind} {request.number} of {request.author!r}"
    return EngineLostError(
        f"{what} was under way in engines {' and '.join(map(repr, lost))} when they were lost: it is not tried again. "
        "See their logs: the call may be what ends them"
    )
