"""One agent answers at once: what every workflow has to beat (Prompt Choreography, section 4.1)."""

from __future__ import annotations

from choreo_agents.graph import END, START, Agent, ChoreoGraph
from choreo_agents.graph.words.prompts import Prompt
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
    """The graph of a single call.

    Args:
        system: The public root.
        private: A system prompt behind it, which the question is read in the light of: notes.
        prompt: What it is asked besides the question.
        speaker: Its name.
        sampling: How it chooses tokens.
    """
    graph = ChoreoGraph(system=system)
    graph.add_node(SOLVER, Agent(speaker, system=private, prompt=prompt, sampling=sampling))
    graph.add_edge(START, SOLVER)
    graph.add_edge(SOLVER, END)
    return graph
