"""Plays traces on so many engines in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from simpy import Environment

from choreo_agents.engine.elsewhere.fleet import Fleet
from choreo_agents.engine.elsewhere.front import COPIED_BYTES
from choreo_agents.engine.elsewhere.routing import Routing, route
from choreo_agents.engine.elsewhere.sending import Greeted
from choreo_agents.engine.messages.scope import Scope
from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.simulating.costs import ServingCosts
from choreo_agents.lab.simulating.engines import EncodedTokens, Processing, SharedCores, SimulatedEngine
from choreo_agents.lab.simulating.fronts import Copied, SimulatedDirectory, SimulatedFront
from choreo_agents.lab.simulating.outcome import SimulatedOutcome
from choreo_agents.lab.simulating.trace import RecordedTrace, Task, TracedFunction, TracedRun
from choreo_agents.lab.simulating.workload import WorkedThread, Workload
from choreo_agents.runtime.scheduler import Limits

OnCall = Callable[[int], None]
"""Told how many calls are over."""


@dataclass(frozen=True)
class Setting:
    """What work is done, and by whom.

    Args:
        costs: Of the machines.
        copies: How often each trace is run.
        rate: Threads that begin in a second, at random; None: all begin at once.
        seed: Of when they begin.
        fronts: How many share the threads and the engines.
        routing: Decides where calls are run.
        copied_bytes: Of KV that may be on its way to an engine at once at most.
    """

    costs: ServingCosts
    copies: int = 1
    rate: float | None = None
    seed: int = 0
    fronts: int = 1
    routing: Routing = route
    copied_bytes: int = COPIED_BYTES

    def __post_init__(self) -> None:
        for name in ("copies", "fronts"):
            if (count := getattr(self, name)) < 1:
                raise InvalidRequestError(f"{name} must be 1 or more, not {count!r}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise InvalidRequestError(f"rate must be a number of threads in a second above 0, not {self.rate!r}")
        if self.costs.bytes_per_token is None:
            raise InvalidRequestError("costs do not say the bytes of a token's KV: see known_costs")


def simulate(
    traces: Sequence[RecordedTrace], engines: int, setting: Setting, on_call: OnCall = lambda done: None
) -> SimulatedOutcome:
    """What comes of so many engines.

    The same traces, engines and setting give the same, to the last bit.

    Raises:
        InvalidRequestError: There are no traces, or no engines.
    """
    if not traces or engines < 1:
        raise InvalidRequestError(f"there must be traces and engines, not {len(traces)} and {engines!r}")
    return _Simulation(traces, engines, setting, on_call).run()


@dataclass
class _Simulation:
    traces: Sequence[RecordedTrace]
    count: int
    setting: Setting
    on_call: OnCall
    env: Environment = field(default_factory=Environment)
    encoded: EncodedTokens = field(default_factory=EncodedTokens)
    moved: Copied = field(default_factory=Copied)
    run_s: list[float] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        costs, header = self.setting.costs, self.traces[0].header
        limits = Limits(step_tokens=header.step_tokens, rows=header.rows)
        self.cores = SharedCores(costs.cores)
        width = len(str(self.count - 1))
        names = [f"engine {number:0{width}}" for number in range(self.count)]
        self.engines = {
            name: SimulatedEngine(self.env, name, costs, limits, self.cores, self.encoded) for name in names
        }
        # A front that is the only one has nobody to hear of.
        self.directory = SimulatedDirectory(self.env, costs) if self.setting.fronts > 1 else None
        self.work = Workload(self.traces, self.setting.copies, self.setting.fronts)
        self.fronts = [self._front(number, limits) for number in range(self.setting.fronts)]

    def _front(self, number: int, limits: Limits) -> SimulatedFront:
        setting, costs, far = self.setting, self.setting.costs, [*self.engines.values()]
        named: Any = far  # a fleet asks no more of an engine than its name, and that it is there
        greeted = Greeted(
            served=cast(Any, None), total_tokens=0, kv_budget_bytes=0, rows=limits.rows, mapped_storage="full", held={}
        )
        name = "" if setting.fronts == 1 else f"front {number}"
        fleet = Fleet(named, setting.routing, costs.routing, costs.bytes_per_token or 0, setting.copied_bytes, name)
        for engine in far:
            fleet.came(engine.name, greeted)
        return SimulatedFront(self.env, number, fleet, self.engines, costs, self.directory, self.cores, self.moved)

    def run(self) -> SimulatedOutcome:
        begins = [*self._begins()]
        self.began_s = begins[0]
        for thread, begins_s in zip(self.work.threads, begins, strict=True):
            self.env.process(self._thread(thread, self.fronts[thread.front], begins_s))
        calls, samples = self.work.calls, self.work.samples
        self.env.run()
        moved, encoded, engines = self.moved, self.encoded, [*self.engines.values()]
        assert moved.calls == calls, "every call ends, once"
        return SimulatedOutcome(
            engines=self.count,
            fronts=len(self.fronts),
            calls=calls,
            samples=samples,
            makespan_s=self.ended_s - self.began_s,
            first_token_s=tuple(moved.first_token_s),
            run_s=tuple(self.run_s),
            bytes_moved=moved.bytes_moved,
            copies=moved.copies,
            copies_refused=moved.refused,
            calls_moved=moved.moved,
            tokens_first=encoded.first,
            tokens_again=encoded.again,
            tokens_decoded=encoded.decoded,
            engines_busy_s=tuple(engine.busy_s for engine in engines),
            front_busy_s=sum(front.clerk.busy_s for front in self.fronts),
            directory_busy_s=0.0 if self.directory is None else self.directory.clerk.busy_s,
            directory_ids=0 if self.directory is None else self.directory.ids,
            most_tokens_held=max(engine.most_tokens for engine in engines),
            steps=sum(engine.steps for engine in engines),
        )

    def _begins(self) -> Iterator[float]:
        """When threads begin."""
        drawn, at_s = random.Random(self.setting.seed), 0.0
        for _ in self.work.threads:
            if self.setting.rate is not None:
                at_s += drawn.expovariate(self.setting.rate)
            yield at_s

    def _thread(self, thread: WorkedThread, front: SimulatedFront, begins_s: float) -> Processing:
        yield self.env.timeout(begins_s)
        scope = Scope(None, is_threads=True)
        for run in thread.runs:
            began = self.env.now
            yield self.env.process(self._run(thread, run, front, scope))
            self.run_s.append(self.env.now - began)
        front.drop(self.work.ended(thread))
        self.ended_s = self.env.now

    def _run(self, thread: WorkedThread, run: TracedRun, front: SimulatedFront, scope: Scope) -> Processing:
        done: dict[int, Any] = {}
        for task in run.tasks:
            done[task.number] = self.env.process(self._task(thread, task, front, scope, done))
        yield self.env.all_of(done.values())

    def _task(
        self, thread: WorkedThread, task: Task, front: SimulatedFront, scope: Scope, done: Mapping[int, Any]
    ) -> Processing:
        for number in task.after:
            yield done[number]
        if isinstance(task, TracedFunction):
            yield self.env.timeout(task.took_s)
        else:
            yield from front.call(self.work.asked(thread, task), scope)
            self.on_call(self.moved.calls)
