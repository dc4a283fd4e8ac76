"""What the next step does: who is dropped, who is admitted, and how many tokens of whom it encodes.

A policy says it, or a timetable that is kept to. Where all that run sample a token, and nobody waits, comes or goes,
each step is the one before, a token further. That nothing has happened is known without a look at each request: whoever
changes something takes the engine's lock, which counts; a call that is cancelled wakes the loop; and when the first
gives up is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from choreo_agents.errors import CapacityError
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.pool import KVPool
from choreo_agents.runtime.lock import EngineLock
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import (
    FirstComeFirstServed,
    Limits,
    Plan,
    Running,
    SchedulingPolicy,
    Waiting,
    require_sound,
)
from choreo_agents.runtime.step import Row
from choreo_agents.runtime.timetable import Timetable
from choreo_agents.runtime.under_way import UnderWay, failed
from choreo_agents.sampling import Chosen, Sampler

Watch = Callable[[Sequence[tuple[Request, int]]], None]
"""Is told of a step: requests, and how many tokens of each."""
Planned = tuple[SchedulingPolicy, Limits, Timetable | None]


@dataclass
class Steady:
    """The rows of a step that may be followed by the same, a token further."""

    rows: list[Row]
    """One of each request that runs, which samples after its only token."""
    requests: Sequence[Request]
    """Whose they are, in the same order."""
    samplers: Mapping[int, Sampler]
    """By request."""
    lock: EngineLock
    """The engine's, which is held."""
    changed: threading.Event
    """Set whenever there may be something to decide about."""

    def __post_init__(self) -> None:
        self._taken = self.lock.taken
        deadlines = [deadline for request in self.requests for deadline in request.deadlines.values()]
        self._until = min(deadlines, default=float("inf"))
        for request in self.requests:
            request.tell_cancelled(self.changed.set)

    @staticmethod
    def suits(rows: Sequence[Row], running: int) -> bool:
        """Return whether these rows are those of all `running` requests, and each samples after its only token."""
        if not rows or len(rows) < running:
            return False
        return all(row.samples and len(row.tokens) == 1 for row in rows)

    def further(self, chosen: Mapping[int, Chosen]) -> list[Row] | None:
        """The next step's rows; None if something has happened, so that it has to be decided anew.

        Args:
            chosen: What the step has sampled; every row goes on with that.
        """
        if self.changed.is_set() or self.lock.taken != self._taken or time.perf_counter() >= self._until:
            return None
        self.rows = [
            Row(number, (chosen[number].token,), first + 1, segment, view, samples, adapter, mapper, tenant)
            for number, _, first, segment, view, samples, adapter, mapper, tenant, *_ in self.rows
        ]
        return self.rows


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
        lock: The engine's.
        changed: Set whenever there may be something to decide about.
        planned: The policy that says what a step does, its bounds, and a timetable that writes down every step, or
            prescribes them.
    """

    def __init__(
        self, pool: KVPool, under_way: UnderWay, lock: EngineLock, changed: threading.Event, planned: Planned
    ) -> None:
        self._pool, self._under_way = pool, under_way
        self._lock, self._changed = lock, changed
        self._policy, self._limits, self._timetable = planned
        self.watches: list[Watch] = [] if self._timetable is None else [self._timetable.record]
        """Are told of every step that is about to run, if anybody is."""
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
            if self.watches:
                self._tell([(request, 1) for request in steady.requests])
            return NextStep(rows, [], len(rows), steady.samplers)
        self._changed.clear()
        self._under_way.drop_left()
        return self._planned()

    def _planned(self) -> NextStep:
        under_way, running = self._under_way, self._under_way.running
        seen = under_way.seen()
        unfinished = len(under_way)
        plan = self._plan(seen, under_way.room())
        if plan is None:
            return NextStep([], [], unfinished, {})
        by_number = {request.number: request for request in under_way.waiting}
        refused = {number: under_way.given_up(by_number[number]) for number in plan.stuck}
        chunks = dict(plan.chunks)
        for number in plan.admitted:
            refusal = self._admit(by_number[number], chunks)
            if refusal is not None:
                refused[number] = refusal
        if self._pool.borrowed:
            refused = {}  # who copies beside steps gives room back, as who runs does
        for number, refusal in refused.items():
            under_way.drop(by_number[number], refusal)
        rows = [_row(running[n], count) for n, count in plan.chunks if n in running]
        admitted = [running[n].binding for n in plan.admitted if n in running]
        arrivals = [arrival for binding in admitted if binding is not None for arrival in binding.arrivals]
        if self.watches:
            self._tell([(running[row.number], len(row.tokens)) for row in rows])
        samplers = _samplers(running[row.number] for row in rows)
        if self._repeats and not under_way.waiting and Steady.suits(rows, len(running)):
            served = [running[row.number] for row in rows]
            self._steady = Steady(rows, served, samplers, self._lock, self._changed)
        waits = (under_way.waiting or running) and not refused
        return NextStep(rows, arrivals, unfinished if rows or waits else 0, samplers)

    def _plan(self, seen: Sequence[Waiting], free_tokens: int) -> Plan | None:
        """What the policy says of those that wait, if it is sound; None if the timetable's next step cannot run yet."""
        running = self._under_way.running
        if self._timetable is not None and self._timetable.is_kept_to:
            return self._timetable.plan(self._under_way, running)
        served = [Running(r.number, r.pending, r.priority, r.tenant) for r in running.values()]
        plan = self._policy.plan(seen, served, free_tokens, self._limits)
        if type(self._policy) is not FirstComeFirstServed:
            require_sound(plan, seen, served, self._limits)
        return plan

    @property
    def _repeats(self) -> bool:
        """Whether the same requests get again what they got: a token of each that decodes, if none waits."""
        if self._timetable is not None and self._timetable.is_kept_to:
            return False
        return type(self._policy) is FirstComeFirstServed

    def _tell(self, chunks: Sequence[tuple[Request, int]]) -> None:
        """Tell of a step that is about to run: requests, and how many tokens of each."""
        for watch in self.watches if chunks else ():
            watch(chunks)

    def _admit(self, request: Request, chunks: Mapping[int, int]) -> CapacityError | None:
        """Let a request run that waits, if it can begin; why it never can, if nothing runs that would make room."""
        try:
            if request.over or not self._under_way.can_begin(request, chunks):
                return None  # it waits on, for what is computed or fetched for it: room is not what it lacks
            return self._under_way.admit(request, alone=not self._under_way.running)
        except Exception as cause:
            self._under_way.drop(request, failed(cause))
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
