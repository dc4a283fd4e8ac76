"""Workflows of stated lengths, recorded one run after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from choreo_agents.engine import Engine, Memory
from choreo_agents.graph import END, START, Agent, ChoreoGraph, Send, Worker
from choreo_agents.lab.experiments.bench_workflows.scenarios import (
    Instance,
    Lengths,
    ScenarioWords,
    Utterances,
    parallel_debate,
    tree,
    vocabulary_of,
)
from choreo_agents.models import LoadedModel
from choreo_agents.workflows.branch_solve_merge import branch_solve_merge
from choreo_agents.workflows.running import run_graph

PARTS, TASKS = 6, 16
"""Of a plan, and Sends at once."""
_TASK = 16
"""Tokens of each."""
_KV_BYTES = 1 << 29


def debates(words: ScenarioWords) -> Instance:
    """Three agents side by side, three rounds; each reads what all have said in the round before."""
    return parallel_debate().build(words)


def thoughts(words: ScenarioWords) -> Instance:
    """Eight candidates side by side, four votes on all of them, and an answer."""
    return tree().build(words)


def parts(words: ScenarioWords) -> Instance:
    """A plan, its parts side by side, and a merge of all."""
    tasks = [words.text(f"part {number}", _TASK) for number in range(PARTS)]
    return Instance(branch_solve_merge(tasks, system=words.system("all")), words.problem(), Utterances(words))


def sends(words: ScenarioWords) -> Instance:
    """A planner, many workers side by side over a large document, and a writer who reads them all."""
    graph, worker = ChoreoGraph(system=words.system("all"), visibility="shared"), Worker("worker")
    tasks = [words.text(f"task {number}", _TASK) for number in range(TASKS)]

    def split(state: Mapping[str, Any]) -> list[Send]:
        return [worker.send(state, task) for task in tasks]

    graph.add_node(Agent("planner")).add_node(worker).add_node(Agent("writer"))
    graph.add_edge(START, "planner").add_conditional_edges("planner", split, ["worker"])
    graph.add_edge("worker", "writer").add_edge("writer", END)
    return Instance(graph, words.problem(), Utterances(words))


WORKLOADS: Mapping[str, Callable[[ScenarioWords], Instance]] = {
    "debates": debates,
    "tree of thoughts": thoughts,
    "branch, solve, merge": parts,
    "sends": sends,
}


def lengths_of(workload: str, lengths: Lengths, trunk: int) -> Lengths:
    """Of a workload: that with many Sends has a question of `trunk` tokens, and shorter answers."""
    return replace(lengths, problem=trunk, utterance=lengths.utterance // 2) if workload == "sends" else lengths


def record_workload(
    model: LoadedModel, workload: str, lengths: Lengths, runs: int, path: Path, on_run: Callable[[], None]
) -> None:
    """Record so many runs, each on words of its own, one after the other.

    Args:
        model: Serves them.
        workload: One of `WORKLOADS`.
        lengths: Of what is said.
        runs: How many.
        path: The recording.
        on_run: Told of every run that is over.
    """
    vocabulary = vocabulary_of(model)
    with Engine.load(model, memory=Memory(kv_budget_bytes=_KV_BYTES)) as engine, engine.record(path):
        for number in range(runs):
            made = WORKLOADS[workload](ScenarioWords(vocabulary, lengths, number))
            asyncio.run(run_graph(engine, made.graph, [("user", made.question)], replay=made.said))
            on_run()
