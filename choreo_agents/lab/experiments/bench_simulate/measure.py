"""Runs debates on one engine and over two, and foretells both from a recording and from micro-benchmarks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from choreo_agents.engine import Engine, Memory
from choreo_agents.lab.experiments.bench_routing.workloads import WORKLOADS
from choreo_agents.lab.experiments.bench_workflows.scenarios import (
    Instance,
    Lengths,
    ScenarioWords,
    parallel_debate,
    vocabulary_of,
)
from choreo_agents.lab.simulating.costs import CostsFile, KnownCosts, MeasuredOn, known_costs
from choreo_agents.lab.simulating.far import MakeFront, in_process, measured_far_cores, measured_transfer
from choreo_agents.lab.simulating.installed import require_simpy
from choreo_agents.lab.simulating.measuring import Probe, measured_cores, measured_costs
from choreo_agents.lab.simulating.outcome import percentile
from choreo_agents.lab.simulating.trace import RecordedTrace, read_trace
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EventList, KVCopied
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.running import run_graph

ENGINES = (1, 2)
"""One without a front elsewhere, and a front over two."""
FIGURES = ("makespan_s", "calls_per_s", "first_token_s", "first_token_p95_s", "moved_bytes")
DEBATES = "debates"
REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
WARM_UP = Lengths(8, 8, 4)
"""Of debates on each engine before those that count."""
_WARM = 2
_KV_BYTES = 1 << 29


@dataclass(frozen=True)
class SimulateBench:
    """What is run, and on what.

    Args:
        model: Serves all.
        lengths: Of what is said.
        debates: At once.
        agents: Of each.
        rounds: Of each.
        seed: Of the words.
        probe: How much is measured before each round; None: costs are given.
        costs: Those that are given.
        make_front: Makes the front over several engines, which share cores with it as they are measured to.
        workload: What is run: one of `WORKLOADS`; of debates, as many agents and rounds as are said.
    """

    model: LoadedModel
    lengths: Lengths = field(default_factory=lambda: Lengths(16, 32, 24))
    debates: int = 32
    agents: int = 3
    rounds: int = 3
    seed: int = 0
    probe: Probe | None = None
    costs: Sequence[CostsFile] = ()
    make_front: MakeFront = in_process
    workload: str = DEBATES

    def measure(self, journal: Journal, repeats: int, on_progress: Callable[[str], None] = lambda what: None) -> None:
        """Do what the journal does not hold yet.

        Args:
            journal: Gets a record of each round.
            repeats: Rounds.
            on_progress: Told of every run that is over, or was before.
        """
        for number in range(repeats):
            if str(number) in journal:
                for engines in ENGINES:
                    on_progress(_named(engines))
                continue
            journal.add(str(number), self.round(number, on_progress))

    def round(self, number: int, on_progress: Callable[[str], None] = lambda what: None) -> Record:
        """Costs, a recording, and for each number of engines what was measured and what was foretold.

        Raises:
            InvalidRequestError: SimPy is not installed.
        """
        require_simpy()
        from choreo_agents.lab.simulating.simulation import Setting, simulate  # noqa: PLC0415 - an optional extra

        with TemporaryDirectory() as named:
            folder = Path(named)
            found, cores = [*self.costs, *self._measured()], self._measured_cores()
            with self._engine() as engine:
                trace = self._recorded(engine, folder / "trace.jsonl", number, at_once=False)
            known = known_costs(found, trace.header)
            figures: dict[str, Any] = {}
            for engines in ENGINES:
                told = EventList()
                with self._on(engines, known, told) as engine:
                    real = self._recorded(engine, folder / f"{engines}.jsonl", number, at_once=True, told=told)
                # An engine without a front elsewhere is sent nothing.
                costs = replace(known.costs, call_s=0.0) if engines == 1 else known.costs
                costs = replace(costs, cores=cores.get(engines, costs.cores))
                simulated = simulate([trace], engines, Setting(costs))
                figures[str(engines)] = {
                    "measured": figures_of(real) | {"moved_bytes": _moved_bytes(told)},
                    "simulated": {
                        "makespan_s": simulated.makespan_s,
                        "calls_per_s": simulated.calls_per_s,
                        "first_token_s": simulated.first_token(50),
                        "first_token_p95_s": simulated.first_token(95),
                        "moved_bytes": simulated.bytes_moved,
                    },
                }
                on_progress(_named(engines))
        costs_of = [each.model_dump(mode="json") for each in found]
        return {"round": number, "costs": costs_of, "cores": cores, "engines": figures}

    def _measured(self) -> list[CostsFile]:
        """What the machine does now."""
        if self.probe is None:
            return []
        with self._engine() as engine:
            costs = measured_costs(engine, self.probe)
            shared = measured_transfer(self.model, self.make_front, self.probe)
            where = MeasuredOn.here(engine.record.conditions(), self.model.name)
        return [costs, CostsFile(costs=shared, measured_on=where)]

    def _measured_cores(self) -> dict[int, float]:
        """That one engine shares with the graphs of its process, and several with the front and each other."""
        if self.probe is None:
            return {}
        with self._engine() as engine:
            one = measured_cores(engine, self.probe)
        return {1: one, 2: measured_far_cores(self.model, self.make_front, self.probe)}

    def _on(self, engines: int, known: KnownCosts, told: EventList) -> AbstractContextManager[Engine]:
        if engines == 1:
            return self._engine()
        return self.make_front(self.model, engines, costs=known.costs.routing, sink=told)

    @contextmanager
    def _engine(self) -> Iterator[Engine]:
        with Engine.load(self.model, memory=Memory(kv_budget_bytes=_KV_BYTES)) as engine:
            yield engine

    def _recorded(
        self, engine: Engine, path: Path, number: int, *, at_once: bool, told: EventList | None = None
    ) -> RecordedTrace:
        """Runs, all at once or one after the other, behind a few that do not count."""
        asyncio.run(_held(engine, self._instances(_WARM, WARM_UP, -1 - number), at_once=True))
        time.sleep(REST_S)
        instances = self._instances(self.debates, self.lengths, number)
        if told is not None:
            told.events.clear()
        with engine.record(path):
            asyncio.run(_held(engine, instances, at_once=at_once))
        return read_trace(path)

    def _instances(self, count: int, lengths: Lengths, number: int) -> list[Instance]:
        vocabulary = vocabulary_of(self.model)
        build = (
            parallel_debate(self.agents, self.rounds).build if self.workload == DEBATES else WORKLOADS[self.workload]
        )
        first = self.seed + number * max(count, self.debates)
        return [build(ScenarioWords(vocabulary, lengths, first + place)) for place in range(count)]


def figures_of(trace: RecordedTrace) -> Record:
    """Of runs as they were recorded, what a simulation tells of them."""
    waited = [seconds for run in trace.runs for seconds in run.first_token_s()]
    return {
        "makespan_s": trace.makespan_s,
        "calls_per_s": len(trace.calls) / trace.makespan_s,
        "first_token_s": percentile(waited, 50),
        "first_token_p95_s": percentile(waited, 95),
    }


def _moved_bytes(told: EventList) -> int:
    """Of KV that was copied from one engine to another."""
    return sum(event.bytes for event in told.events if isinstance(event, KVCopied))


async def _held(engine: Engine, instances: Sequence[Instance], *, at_once: bool) -> None:
    runs = [run_graph(engine, each.graph, [("user", each.question)], replay=each.said) for each in instances]
    if at_once:
        await asyncio.gather(*runs)
    else:
        for run in runs:
            await run


def _named(engines: int) -> str:
    return "one engine" if engines == 1 else f"{engines} engines"
