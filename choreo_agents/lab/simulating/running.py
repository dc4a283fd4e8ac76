"""One workload on several numbers of engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from choreo_agents.lab.simulating.costs import KnownCosts
from choreo_agents.lab.simulating.outcome import SimulatedOutcome
from choreo_agents.lab.simulating.report import SimulationReport
from choreo_agents.lab.simulating.rules import RULES
from choreo_agents.lab.simulating.simulation import Setting, simulate
from choreo_agents.lab.simulating.trace import RecordedTrace

OnSimulated = Callable[[int, int], None]
"""Told of how many engines, and how many of the calls are over."""


def simulated(
    traces: Sequence[RecordedTrace],
    engines: Sequence[int],
    known: KnownCosts,
    *,
    copies: int = 1,
    rate: float | None = None,
    seed: int = 0,
    fronts: int = 1,
    rule: str = "route",
    on_call: OnSimulated = lambda engines, calls: None,
) -> SimulationReport:
    """What comes of each number of engines.

    Args:
        traces: What they do.
        engines: How many.
        known: What that costs.
        copies: How often each trace is run.
        rate: Threads begun in a second; None: all at once.
        seed: Of when they begin.
        fronts: That share them.
        rule: The name of that by which calls are placed (see `RULES`).
        on_call: Told of every call.
    """
    setting = Setting(known.costs, copies, rate, seed, fronts, RULES[rule])
    outcomes: list[SimulatedOutcome] = []
    for count in engines:
        outcomes.append(simulate(traces, count, setting, partial(on_call, count)))
    settings = {
        "traces": [trace.path.name for trace in traces],
        "model": traces[0].header.model,
        "fingerprint": traces[0].header.conditions["model"],
        "engines": list(engines),
        "copies": copies,
        "rate": rate,
        "seed": seed,
        "fronts": fronts,
        "rule": rule,
    }
    notes = [note for trace in traces for note in trace.notes]
    return SimulationReport(settings, known, outcomes, [*notes, *_mixed(traces)])


def _mixed(traces: Sequence[RecordedTrace]) -> list[str]:
    """What is not the same in all recordings."""
    limits = {(trace.header.step_tokens, trace.header.rows) for trace in traces}
    return [] if len(limits) == 1 else ["recordings were made with other bounds of a step: the first one's are used"]
