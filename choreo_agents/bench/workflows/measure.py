"""Runs every scenario on every problem under every method, taking turns; what is known already is not run again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from choreo_agents.bench.journal import Journal
from choreo_agents.bench.running import RunCost, run_graph
from choreo_agents.bench.workflows.scenarios import Lengths, Scenario, Words
from choreo_agents.engine import Engine
from choreo_agents.engine.methods import MethodName
from choreo_agents.models import LoadedModel

REST_S = 0.2
"""Between two runs: the threads of the one before may spin for a while."""
METHODS: tuple[MethodName, ...] = ("choreo", "baseline", "naive")
OnProgress = Callable[[str], None]


def key_of(scenario: str, lengths: Lengths, problem: int, method: str) -> str:
    """Names a run in a journal."""
    return f"{scenario} | {lengths.system}/{lengths.problem}/{lengths.utterance} | {problem} | {method}"


def measure_workflows(
    model: LoadedModel,
    scenarios: Sequence[Scenario],
    journal: Journal,
    *,
    problems: int,
    lengths: Lengths = Lengths(),
    methods: Sequence[MethodName] = METHODS,
    naive_problems: int | None = None,
    kv_budget_bytes: int = 1 << 30,
    on_progress: OnProgress = lambda what: None,
) -> None:
    """Run what the journal does not hold yet. Each run has a fresh engine, and all say the same, at full price.

    Args:
        model: Serves all.
        scenarios: Of what size.
        journal: Gets a record of each run.
        problems: How many different ones.
        lengths: Of prompts and utterances.
        methods: In turn; the first of a problem is another for the next problem.
        naive_problems: On how many of the problems `naive` runs; by default on all.
        kv_budget_bytes: Of each engine.
        on_progress: Told of every run that is over, or was before.
    """
    warm = False
    for problem in range(problems):
        for scenario in scenarios:
            for place in range(len(methods)):
                method = methods[(place + problem) % len(methods)]
                key = key_of(scenario.name, lengths, problem, method)
                if method == "naive" and naive_problems is not None and problem >= naive_problems:
                    continue
                if key not in journal:
                    if not warm:
                        _run(model, scenario, Lengths(8, 8, 8), 0, method, kv_budget_bytes)
                        warm = True
                    cost = _run(model, scenario, lengths, problem, method, kv_budget_bytes)
                    record = {
                        "scenario": scenario.name,
                        "problem": problem,
                        "method": method,
                        "lengths": asdict(lengths),
                    }
                    journal.add(key, {**record, **asdict(cost)})
                on_progress(key)


def _run(
    model: LoadedModel, scenario: Scenario, lengths: Lengths, problem: int, method: MethodName, kv_budget_bytes: int
) -> RunCost:
    instance = scenario.build(model, Words(model, lengths, problem))
    with Engine.load(model, method=method, kv_budget_bytes=kv_budget_bytes) as engine:
        time.sleep(REST_S)
        replay, question = instance.said, [("user", instance.question)]
        _, cost = asyncio.run(run_graph(engine, instance.graph, question, replay=replay))
    return cost
