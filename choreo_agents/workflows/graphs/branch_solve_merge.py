"""Branch-solve-merge (Prompt Choreography, section 3.3): a plan in parts, parallel solvers, and a merger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from choreo_agents.graph import END, START, Agent, ChoreoGraph, Send, Strategy, Synthesizer, Worker
from choreo_agents.sampling import Sampling

PLANNER, SOLVER, MERGER = "planner", "solver", "merger"


def branch_solve_merge(
    parts: Sequence[str],
    *,
    system: str | None = None,
    plan: str | None = None,
    merge: str | None = None,
    strategy: Strategy = "sequential",
    speakers: Sequence[str] = ("Planner", "Merger"),
    sampling: Sampling | None = None,
) -> ChoreoGraph:
    """Return a graph with a planner, parallel solvers and a merger.

    Args:
        parts: Prompts of the solvers: one branch for each.
        system: System prompt that all agents share.
        plan: Prompt of the planner, after the problem.
        merge: Prompt of the merger.
        strategy: How the merger reads the parts (see `Synthesizer`).
        speakers: Names of planner and merger, then of the solvers, in turn; by default solvers are called `Solver`.
        sampling: Sampling of all agents.

    Raises:
        ValueError: There are no parts, or planner and merger have no names.
    """
    if not parts:
        raise ValueError("there are no parts to solve: pass at least one")
    if len(speakers) < 2:
        raise ValueError(f"speakers must name at least the planner and the merger, not {list(speakers)!r}")
    graph = ChoreoGraph(system=system)
    solver = Worker(SOLVER, sampling=sampling)
    names = cycle(speakers[2:] or ["Solver"])

    named = list(zip(parts, names, strict=False))

    def solve(state: Mapping[str, Any]) -> list[Send]:
        return [solver.send(state, part, speaker=name) for part, name in named]

    graph.add_node(PLANNER, Agent(speakers[0], prompt=plan, sampling=sampling))
    graph.add_node(solver)
    merger = Synthesizer(speakers[1], merges=[PLANNER, SOLVER], strategy=strategy, prompt=merge, sampling=sampling)
    graph.add_node(MERGER, merger)
    graph.add_edge(START, PLANNER)
    graph.add_conditional_edges(PLANNER, solve, [SOLVER])
    graph.add_edge(SOLVER, MERGER)
    graph.add_edge(MERGER, END)
    return graph
