"""What the next step does: who is dropped, who is admitted, and how many tokens of whom it encodes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.pool import KVPool
from choreo_agents.runtime.endings import failed
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.planner import Planner
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.steady import Steady
from choreo_agents.runtime.step import Row
from choreo_agents.runtime.under_way import Refusal, UnderWay
from choreo_agents.sampling import Chosen, Sampler


class NextStep(NamedTuple):
    """Of an engine, as it was decided under its lock."""

    rows: list[Row]
    arrivals: list[Arrival]
    """What it brings into the pool."""
    unfinished: int
    """Requests that were when it was decided; 0 if there is nothing to wait for, either."""
    samplers: Mapping[int, Sampler]
    """By request, of those that decode."""


class NextSteps:
    """Decides one after the other. Used under the engine's lock.

    Args:
        pool: Gives room.
        under_way: Has those that wait, and those that run.
        planner: Says what a step does.
        lock: The engine's.
        changed: Set whenever there may be something to decide about.
    """

    def __init__(
        self, pool: KVPool, under_way: UnderWay, planner: Planner, lock: EngineLock, changed: threading.Event
    ) -> None:
        self._pool, self._under_way, self._planner = pool, under_way, planner
        self._lock, self._changed = lock, changed
        self._steady: Steady | None = None
        """The last step, if the next one may be the same a token further."""

    def decide(self, went_on: Mapping[int, Chosen] | None = None) -> NextStep:
        """The next step.

        Args:
            went_on: What the last step has sampled, if none of its requests has ended or failed with it.
        """
        steady, self._steady = self._steady, None
        rows = None if steady is None or went_on is None else steady.further(went_on)
        if steady is not None and rows is not None:
            self._steady = steady
            if self._planner.is_told:
                self._planner.record([(request, 1) for request in steady.requests])
            return NextStep(rows, [], len(rows), steady.samplers)
        self._changed.clear()
        self._under_way.drop_left()
        return self._planned()

    def _planned(self) -> NextStep:
        under_way, running = self._under_way, self._under_way.running
        seen = under_way.seen()
        unfinished = len(under_way)
        plan = self._planner.plan(seen, under_way.waiting, running, under_way.room())
        if plan is None:
            return NextStep([], [], unfinished, {})
        by_number = {request.number: request for request in under_way.waiting}
        stuck = [(by_number[number], under_way.given_up(by_number[number])) for number in plan.stuck]
        chunks = dict(plan.chunks)
        for number in plan.admitted:
            refusal = self._admit(by_number[number], chunks)
            if refusal is not None:
                stuck.append((by_number[number], refusal))
        if self._pool.borrowed:
            stuck = []  # who copies beside steps gives room back, as who runs does
        for request, refusal in stuck:
            under_way.drop(request, under_way.no_room(request, refusal))
        rows = [_row(running[n], count) for n, count in plan.chunks if n in running]
        admitted = [running[n].binding for n in plan.admitted if n in running]
        arrivals = [arrival for binding in admitted if binding is not None for arrival in binding.arrivals]
        if self._planner.is_told:
            self._planner.record([(running[row.number], len(row.tokens)) for row in rows])
        samplers = _samplers(running[row.number] for row in rows)
        if self._planner.repeats and not under_way.waiting and Steady.suits(rows, len(running)):
            served = [running[row.number] for row in rows]
            self._steady = Steady(rows, served, samplers, self._lock, self._changed)
        waits = (under_way.waiting or running) and not stuck
        return NextStep(rows, arrivals, unfinished if rows or waits else 0, samplers)

    def _admit(self, request: Request, chunks: Mapping[int, int]) -> Refusal | None:
        """Let a request run that waits, if it can begin; why it never can, if nothing runs that would make room."""
        alone = not self._under_way.running
        try:
            if request.over or not self._under_way.can_begin(request, chunks):
                return None  # it waits on, for what is computed or fetched for it: room is not what it lacks
            refusal = self._under_way.admit(request, alone=alone)
        except Exception as cause:
            self._under_way.drop(request, failed(cause))
            return None
        if refusal is not None:
            return refusal if alone else None
        self._under_way.running[request.number] = request
        return None


def _row(request: Request, count: int) -> Row:
    """What a step encodes of a request: so many tokens at most."""
    assert request.binding is not None and request.segment is not None
    first, count = request.encoded, min(count, request.pending)
    samples = not request.ended and count == request.pending
    tokens = tuple(request.tokens[first : first + count])
    made_by = request.adapter, request.mapper, request.tenant
    return Row(request.number, tokens, first, request.segment, request.binding.view, samples, *made_by)


def _samplers(requests: Iterable[Request]) -> dict[int, Sampler]:
    """What chooses the tokens of those that decode."""
    return {each.number: each.decoding.sampler for each in requests if each.decoding is not None}
