"""Simulates recorded workloads under every rule, at several loads, on several numbers of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from choreo_agents.lab.simulating.costs import ServingCosts
from choreo_agents.lab.simulating.installed import require_simpy
from choreo_agents.lab.simulating.rules import RULES
from choreo_agents.lab.simulating.trace import RecordedTrace
from choreo_agents.training.journal import Journal, Record

_FULL = 16
"""Runs for each recorded one by which an engine's throughput is found."""


def key_of(workload: str, load: float, engines: int, rule: str) -> str:
    """Names a simulation in a journal."""
    return f"{workload} | {load:g} | {engines} | {rule}"


@dataclass(frozen=True)
class RoutingBench:
    """What is simulated.

    Args:
        traces: Of each workload.
        costs: Of all machines; fronts and directory cost nothing here.
        engines: How many.
        loads: Runs that begin in a second, as a share of what so many engines could do of them.
        rules: By which calls are placed.
        per_engine: Runs for each engine.
        seed: Of when they begin.
    """

    traces: Mapping[str, RecordedTrace]
    costs: ServingCosts
    engines: Sequence[int]
    loads: Sequence[float]
    rules: Sequence[str] = tuple(RULES)
    per_engine: int = 8
    seed: int = 0

    @property
    def cells(self) -> int:
        """How many simulations that is."""
        return len(self.traces) * len(self.loads) * len(self.engines) * len(self.rules)

    def measure(self, journal: Journal, on_progress: Callable[[str], None] = lambda what: None) -> None:
        """Do what the journal does not hold yet.

        Args:
            journal: Gets a record of each simulation.
            on_progress: Told of every one that is over, or was before.

        Raises:
            InvalidRequestError: SimPy is not installed.
        """
        for workload, trace in self.traces.items():
            rate = None
            for engines in self.engines:
                for load in self.loads:
                    for rule in self.rules:
                        key = key_of(workload, load, engines, rule)
                        if key not in journal:
                            rate = rate or self._rate(trace)
                            journal.add(key, self._run(trace, workload, engines, load, rule, rate))
                        on_progress(f"{workload}, {engines} engines")

    def _rate(self, trace: RecordedTrace) -> float:
        """Runs that one engine does in a second when it has always enough of them."""
        require_simpy()
        from choreo_agents.lab.simulating.simulation import Setting, simulate  # noqa: PLC0415 - an optional extra

        found = simulate([trace], 1, Setting(self.played, _FULL))
        return _FULL * len(trace.threads()) / found.makespan_s

    def _run(self, trace: RecordedTrace, workload: str, engines: int, load: float, rule: str, rate: float) -> Record:
        from choreo_agents.lab.simulating.simulation import Setting, simulate  # noqa: PLC0415 - an optional extra

        copies = max(1, round(self.per_engine * engines / len(trace.threads())))
        setting = Setting(self.played, copies, load * rate * engines, self.seed, routing=RULES[rule])
        found = simulate([trace], engines, setting)
        return {
            "workload": workload,
            "engines": engines,
            "load": load,
            "rule": rule,
            "run_s": sum(found.run_s) / len(found.run_s),
            "first_token_p50_s": found.first_token(50),
            "first_token_p95_s": found.first_token(95),
            "makespan_s": found.makespan_s,
            "calls": found.calls,
            "bytes_moved": found.bytes_moved,
            "tokens_again": found.tokens_again,
            "calls_moved": found.calls_moved,
            "copies_refused": found.copies_refused,
            "utilisation": found.utilisation,
        }

    @property
    def played(self) -> ServingCosts:
        """The costs without those of fronts and directory."""
        return replace(self.costs, front_s=0.0, answer_s=0.0, token_s=0.0, lookup_s=0.0)
