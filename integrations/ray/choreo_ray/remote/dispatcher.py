"""What is done for one request: it is placed, what its engine lacks is brought there, and the tokens come back."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import replace
from typing import Any, Protocol

from choreo_agents import Prefill
from choreo_agents.engine.delegation import MessageTable, Pending, Request
from choreo_agents.errors import ChoreoError, EngineLostError, HandleError
from choreo_agents.sampling import SampledToken
from choreo_agents.tracing import EventSink, FirstToken, PerTenantCounters, RequestRouted, guarded
from choreo_ray.remote.copies import Copies
from choreo_ray.remote.fleet import Fleet, PlacementRequest, Replica
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.protocol import SentAnswer, SentCall, sent
from choreo_ray.remote.release_queue import ReleaseQueue
from choreo_ray.remote.routing import Route

MOST_LOSSES = 2
"""Engines that a call may be lost with."""


class TaskLoop(Protocol):
    """The loop that runs them."""

    def soon(self, work: Callable[[], object]) -> None:
        """Have something done on its thread."""
        ...

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Begin something that nobody waits for. On its thread."""
        ...

    def finish(self, request: Request) -> None:
        """A request is done. Under the lock."""
        ...


class RequestDispatcher:
    """Runs in the loop's thread; bookkeeping is under the lock.

    Args:
        fleet: The engines.
        presence: Which of them are there.
        table: Has the messages.
        counters: Count what is done elsewhere, too.
        lock: Guards all bookkeeping.
        sink: Receives events.
        router: Names the router.
    """

    def __init__(
        self,
        fleet: Fleet,
        presence: HealthMonitor,
        table: MessageTable,
        counters: PerTenantCounters[Any],
        lock: AbstractContextManager[None],
        sink: EventSink,
        router: str,
    ) -> None:
        self._fleet, self._table, self._counters, self._router = fleet, table, counters, router
        self._lock, self._emit, self.presence = lock, guarded(sink), presence
        self._loop: TaskLoop
        # An engine may remember sequence numbers of this router from before it has begun anew.
        self._sequence_nos = itertools.count(time.time_ns())
        next_sequence_no = self._sequence_nos.__next__
        self.giving_back = ReleaseQueue(fleet, presence, table, lock, router, next_sequence_no)
        self.copies = Copies(fleet, presence, lock, sink, router, next_sequence_no, self.giving_back.needed)
        self._at: dict[int, Replica] = {}
        """Where each request runs."""
        self._arriving: dict[int, int] = {}
        """Bytes that are on their way there for it."""
        self._begun: set[int] = set()
        """Those that their engine has begun with."""

    def attach(self, loop: TaskLoop) -> None:
        """The loop that runs them."""
        self._loop = loop
        self.presence.spawn, self.giving_back.soon = loop.spawn, loop.soon
        self.presence.needed, self.presence.next_sequence_no = self.giving_back.needed, self._sequence_nos.__next__

    def place(self, request: Request, lost: Sequence[str] = ()) -> Route | None:
        """Where a request is run, for which `run` does the rest; None: nowhere now. Under the lock.

        It counts as begun there until `over`.

        Args:
            request: The request.
            lost: Engines that were lost with it.
        """
        pending = _pending(request)
        call = pending.placed.read.call
        name = pending.placed.name if isinstance(call, Prefill) else None
        thread = next((s for scope in pending.scopes.values() if scope for s in scope.chain() if s.is_threads), None)
        found = self._fleet.place(PlacementRequest(request.number, pending.placed.lineage, call, name, thread), lost)
        if found is not None:
            self._at[request.number] = self._fleet.replicas[found.engine]
            self._arriving[request.number] = found.bytes_copied
            why = (found.bytes_copied, found.tokens_encoded, found.expected_s)
            self._emit(RequestRouted(time.perf_counter(), request.number, found.engine, *why))
        return found

    def over(self, number: int) -> None:
        """A request runs nowhere any more. Under the lock."""
        self._begun.discard(number)
        if (replica := self._at.pop(number, None)) is not None:
            self._fleet.ended(replica.name, number)
            self._arrived(number, replica)

    async def raise_priority(self, request: Request) -> None:
        """Tell a request's engine of its priority."""
        with self._lock:
            replica = self._at.get(request.number)
        if replica is not None:
            self.presence.tell(replica, replica.engine.raise_priority(self._router, request.number, request.priority))

    async def leave(self) -> None:
        """Give back all that engines hold for the router."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.copies.settled(), self.presence.patience_s)
        await self.giving_back.leave()

    async def run(self, request: Request, placed: Route | None) -> None:
        """Have a request run where it was placed, and elsewhere if that is lost."""
        lost: list[str] = []
        while not request.over:
            if placed is None:
                await self.presence.awaited()
                with self._lock:
                    if request.over:
                        return
                    placed = self.place(request, lost)
                continue
            replica = self._fleet.replicas[placed.engine]
            epoch = replica.epoch
            try:
                await self._bring(request, placed, replica)
                await self._run_at(request, replica)
                return
            except EngineLostError as cause:
                # It may have ended the engine, unless that was gone before it began, or is there again already.
                if request.number in self._begun and replica.epoch == epoch:
                    lost.append(replica.name)
                self.presence.gone(replica, cause, epoch)
                if len(lost) >= MOST_LOSSES:
                    raise _deadly(request, lost) from cause
                placed = None
            finally:
                with self._lock:
                    self.over(request.number)

    async def _bring(self, request: Request, placed: Route, replica: Replica) -> None:
        pending = _pending(request)
        messages = {parent.handle.id: parent for parent in pending.placed.lineage.parents}
        try:
            await self.copies.bring(pending.message_ids.salt, placed.copies, messages, replica)
        finally:
            with self._lock:
                self._arrived(request.number, replica)

    def _arrived(self, number: int, replica: Replica) -> None:
        """What is copied for a request is on its way no longer."""
        self._fleet.arrived(replica.name, self._arriving.pop(number, 0))

    async def _run_at(self, request: Request, replica: Replica) -> None:
        with self._lock:
            if request.over:
                return
            call = self._sent(request, replica)
            request.binding = request.encoding.bind()
        try:
            await self._hear(request, replica, call)
        except HandleError:
            # It has not all that the router believed it to have: now everything is sent.
            with self._lock:
                if request.over:
                    return
                call = self._sent(request, replica, knows=())
            await self._hear(request, replica, call)

    def _sent(self, request: Request, replica: Replica, knows: Collection[str] | None = None) -> SentCall:
        pending = _pending(request)
        salt, held = pending.message_ids.salt, replica.held.keys() if knows is None else knows
        seed = None if request.decoding is None else request.decoding.seed
        delivered = [chosen.token for chosen in request.chosen]
        self.giving_back.salts[pending.message_ids.tenant] = salt
        numbers = next(self._sequence_nos), request.number
        made = sent(self._router, *numbers, salt, pending.placed, seed, held, delivered, request.priority)
        made = replace(made, promised=self._fleet.first_told(replica.name, made.promised))
        # From now on the engine leases what the call reads, whatever becomes of the call.
        self._fleet.holds(replica.name, dict.fromkeys((parent.id for parent in made.call.parents), salt))
        return made

    async def _hear(self, request: Request, replica: Replica, call: SentCall) -> None:
        before, is_left, encodes = len(request.chosen), True, True
        try:
            async with aclosing(replica.engine.run(call)) as told:
                async for each in told:
                    self._begun.add(request.number)
                    with self._lock:
                        if request.over:
                            return
                        if isinstance(each, SentAnswer):
                            is_left = False
                            self._finish(request, each, replica, call)
                            return
                        if each and encodes:
                            encodes = False
                            self._fleet.encoded(replica.name, request.number)
                        repeated, before = each[:before], max(0, before - len(each))
                        self._take(request, each[len(repeated) :])
            raise EngineLostError(f"engine {replica.name!r} has ended a call without an answer")
        except ChoreoError:
            is_left = False  # the engine has said so
            raise
        finally:
            if is_left:  # it may have ended there all the same
                with self._lock:
                    self.giving_back.left(replica, call.salt, call.sequence_no)

    def _take(self, request: Request, told: Iterable[SampledToken]) -> None:
        for chosen in told:
            if request.first_token_s is None:
                request.first_token_s = now = time.perf_counter()
                self._emit(FirstToken(now, request.number, now - request.submitted_s))
            request.chosen.append(chosen)
            for listener in request.listeners:
                listener(chosen)

    def _finish(self, request: Request, answer: SentAnswer, replica: Replica, call: SentCall) -> None:
        pending = _pending(request)
        self._fleet.holds(replica.name, {answer.id: pending.message_ids.salt})
        if request.decoding is not None:
            request.chosen = list(answer.chosen or ())
            request.decoding.cut = answer.finish_reason == "length"
        self._fleet.ended(replica.name, request.number, call.call, len(answer.chosen or ()))
        usage = answer.usage
        for name in ("tokens_encoded", "tokens_recomputed", "tokens_mapped", "tokens_of_other_models"):
            request.charges[name] = getattr(usage, name)
        request.beyond_elsewhere, request.reused_elsewhere = usage.tokens_outside_view, usage.tokens_reused
        request.tokens = list(answer.tokens)
        for name, amount in answer.counted.items():
            if name != "tokens_reused":
                self._counters.add(request.tenant, name, amount)
        for message_id in call.promised:
            if (message := self._table.known(message_id)) is not None:
                message.promise = None
        self._loop.finish(request)
        made = self._table.get(answer.id)
        if made is None:
            self.giving_back.dropped(answer.id)
        else:
            self._table.entry(made)


def _pending(request: Request) -> Pending:
    owner = request.owner
    assert isinstance(owner, Pending)
    return owner


def _deadly(request: Request, lost: Sequence[str]) -> EngineLostError:
    what = f"{request.kind} {request.number} of {request.author!r}"
    return EngineLostError(
        f"{what} was under way in engines {' and '.join(map(repr, lost))} when they were lost: it is not tried again. "
        "See their logs: the call may be what ends them"
    )
