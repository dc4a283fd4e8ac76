"""Dispatches requests to replicas: choose one, copy missing KV, stream tokens back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

from choreo_agents import Prefill
from choreo_agents.engine.delegation import ActiveRequests, PlacedCall, Request
from choreo_agents.errors import ChoreoError, EngineLostError, HandleError
from choreo_agents.sampling import SampledToken
from choreo_agents.tracing import FirstToken, RequestRouted
from choreo_ray.remote.context import RouterContext
from choreo_ray.remote.copies import Copies
from choreo_ray.remote.fleet import PlacementRequest, Replica
from choreo_ray.remote.health_monitor import HealthMonitor
from choreo_ray.remote.protocol import SentAnswer, SentCall, build_call
from choreo_ray.remote.routing import Route

MOST_LOSSES = 2
"""Engines that may be lost while they run a call before it fails."""


class RequestDispatcher:
    """Dispatcher of requests to replicas. Runs in the loop's thread; bookkeeping is under the lock.

    Args:
        context: The router's.
        health: Knows which engines are up.
        active: Unfinished requests.
    """

    def __init__(self, context: RouterContext, health: HealthMonitor, active: ActiveRequests) -> None:
        self._context, self._fleet, self._lock = context, context.fleet, context.lock
        self.health, self._active = health, active
        self.copies = Copies(context, health)
        self._at: dict[int, Replica] = {}
        """Replica where each request runs, by number."""
        self._begun: set[int] = set()
        """Numbers of requests that their engine has begun."""

    def place(self, request: Request, lost: Sequence[str] = ()) -> Route | None:
        """Choose an engine for a request, which `run` then dispatches; None: no engine is up. Under the lock.

        The request counts as begun there until `over`.

        Args:
            request: The request.
            lost: Engines that were lost while they ran it.
        """
        placed = _placed(request)
        call, lineage = placed.read.call, placed.lineage
        name = placed.name if isinstance(call, Prefill) else None
        thread = next((s for _, scope in placed.callers.values() if scope for s in scope.chain() if s.is_threads), None)
        wanted = PlacementRequest(
            request.number, lineage.parents, len(lineage.tokens), lineage.tenant, call, name, thread
        )
        route = self._fleet.place(wanted, lost)
        if route is not None:
            self._at[request.number] = self._fleet.replicas[route.engine]
            why = (route.bytes_copied, route.tokens_encoded, route.expected_s)
            self._context.emit(RequestRouted(time.perf_counter(), request.number, route.engine, *why))
        return route

    def over(self, number: int) -> None:
        """Stop counting a request at its engine. Under the lock."""
        self._begun.discard(number)
        if (replica := self._at.pop(number, None)) is not None:
            self._fleet.ended(replica.name, number)

    def raise_priority(self, request: Request) -> None:
        """Send a request's priority to its engine. Under the lock."""
        if (replica := self._at.get(request.number)) is not None:
            call = self._context.router, request.number, request.priority
            self.health.notify(replica, partial(replica.engine.raise_priority, *call))

    async def leave(self) -> None:
        """Release all that engines hold for the router."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.copies.settled(), self.health.patience_s)
        await self.health.leave()

    async def run(self, request: Request, route: Route | None) -> None:
        """Run a request where it was placed, and on another engine if that one is lost."""
        lost: list[str] = []
        while not request.over:
            if route is None:
                await self.health.wait_for_engine()
                with self._lock:
                    if request.over:
                        return
                    route = self.place(request, lost)
                continue
            replica = self._fleet.replicas[route.engine]
            epoch = replica.epoch
            try:
                await self._bring(request, route, replica)
                await self._run_at(request, replica)
                return
            except EngineLostError as cause:
                # The call may have ended the engine, unless that was lost before it began, or has come back already.
                if request.number in self._begun and replica.epoch == epoch:
                    lost.append(replica.name)
                self.health.gone(replica, cause, epoch)
                if len(lost) >= MOST_LOSSES:
                    raise _lost_too_often(request, lost) from cause
                route = None
            finally:
                with self._lock:
                    self.over(request.number)

    async def _bring(self, request: Request, route: Route, replica: Replica) -> None:
        placed = _placed(request)
        messages = {parent.handle.id: parent for parent in placed.lineage.parents}
        try:
            await self.copies.bring(placed.builder.message_ids.salt, route.copies, messages, replica)
        finally:
            with self._lock:
                self._fleet.arrived(replica.name, request.number)

    async def _run_at(self, request: Request, replica: Replica) -> None:
        with self._lock:
            if request.over:
                return
            call = self._prepare(request, replica)
            lineage = _placed(request).lineage
            request.begin_elsewhere(lineage.tokens, lineage.placement.position)
        try:
            await self._receive(request, replica, call)
        except HandleError:
            # The engine lacks something that the router believed it to have: send everything.
            with self._lock:
                if request.over:
                    return
                call = self._prepare(request, replica, known_ids=())
            await self._receive(request, replica, call)

    def _prepare(self, request: Request, replica: Replica, known_ids: Collection[str] | None = None) -> SentCall:
        context, held_ids = self._context, replica.held.keys() if known_ids is None else known_ids
        call = build_call(context.router, context.next_sequence_no(), request, _placed(request), held_ids)
        call = replace(call, promised=self._fleet.claim_promised(replica.name, call.promised))
        # From now on the engine leases what the call reads, whatever becomes of the call.
        self._fleet.holds(replica.name, dict.fromkeys((parent.id for parent in call.call.parents), call.salt))
        return call

    async def _receive(self, request: Request, replica: Replica, call: SentCall) -> None:
        before, is_left, encodes = len(request.chosen), True, True
        try:
            async with aclosing(replica.engine.run(call)) as stream:
                async for part in stream:
                    self._begun.add(request.number)
                    with self._lock:
                        if request.over:
                            return
                        if isinstance(part, SentAnswer):
                            is_left = False
                            self._finish(request, part, replica, call)
                            return
                        if part and encodes:
                            encodes = False
                            self._fleet.encoded(replica.name, request.number)
                        repeated, before = part[:before], max(0, before - len(part))
                        self._append(request, part[len(repeated) :])
            raise EngineLostError(f"engine {replica.name!r} ended a call without an answer")
        except ChoreoError:
            is_left = False  # the engine knows that the call has ended
            raise
        finally:
            if is_left:  # the engine may have finished it all the same
                with self._lock:
                    self.health.release(replica, call.salt, (), [call.sequence_no])

    def _append(self, request: Request, tokens: Iterable[SampledToken]) -> None:
        for chosen in tokens:
            if request.first_token_s is None:
                request.first_token_s = now = time.perf_counter()
                self._context.emit(FirstToken(now, request.number, now - request.submitted_s))
            request.chosen.append(chosen)
            for listener in request.listeners:
                listener(chosen)

    def _finish(self, request: Request, answer: SentAnswer, replica: Replica, call: SentCall) -> None:
        self._fleet.holds(replica.name, {answer.id: call.salt})
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
                self._context.counters.add(request.tenant, name, amount)
        for message_id in call.promised:
            if (message := self._context.table.known(message_id)) is not None:
                message.promise = None
        self._active.finish(request)
        stored = self._context.table.get(answer.id)
        if stored is None:
            self.health.release_message(answer.id)
        else:
            self._context.table.entry(stored)


def _placed(request: Request) -> PlacedCall:
    owner = request.owner
    assert isinstance(owner, PlacedCall)
    return owner


def _lost_too_often(request: Request, lost: Sequence[str]) -> EngineLostError:
    label = f"{request.kind} {request.number} of {request.author!r}"
    return EngineLostError(
        f"{label} was running on engines {' and '.join(map(repr, lost))} when they were lost: it is not retried. See "
        "their logs: the call may have crashed them"
    )
