"""A single agent that answers at once: the baseline of all workflows (Prompt Choreography, section 4.1)."""

from __future__ import annotations

from choreo_agents.graph import END, START, Agent, ChoreoGraph
from choreo_agents.graph.prompts import Prompt
from choreo_agents.sampling import Sampling

SOLVER = "solver"


def direct(
    *,
    system: str | None = None,
    private: str | None = None,
    prompt: Prompt | None = None,
    speaker: str = "Solver",
    sampling: Sampling | None = None,
) -> ChoreoGraph:
    """Return a graph with a single agent.

    Args:
        system: Shared system prompt.
        private: Private system prompt, such as notes: the question is encoded behind it.
        prompt: Prompt after the question.
        speaker: Name of the agent.
        sampling: Sampling of the agent.
    """
    graph = ChoreoGraph(system=system)
    graph.add_node(SOLVER, Agent(speaker, system=private, prompt=prompt, sampling=sampling))
    graph.add_edge(START, SOLVER)
    graph.add_edge(SOLVER, END)
    return graph
