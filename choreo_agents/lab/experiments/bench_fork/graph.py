"""The same fork as a graph, for `choreo audit --measure`: subagents share what a parent was told and has said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from choreo_agents.graph import END, START, Agent, ChoreoGraph, ChoreoState
from choreo_agents.lab.language.tasks.recall import READ
from choreo_agents.sampling import Sampling

PARENT, SUBAGENTS = "Grace", ("Alice", "Bruno", "Clara")
_ANSWER = Sampling(max_tokens=16)


class ForkState(ChoreoState, total=False):
    """A fork's channels: handles, messages, and what each subagent is asked."""

    tasks: dict[str, str]


def graph() -> ChoreoGraph:
    """A parent and three subagents. Inputs give `systems`, and `tasks`, by the subagents' names."""
    made = ChoreoGraph(ForkState, system=READ)
    # The parent's question is about what is told before it; the input itself is encoded for all of them.
    made.add_node(PARENT, Agent(PARENT, sampling=_ANSWER)).add_edge(START, PARENT, visibility="reencoded")
    for name in SUBAGENTS:
        task: Callable[[Mapping[str, Any]], str] = partial(_task, name)
        made.add_node(name, Agent(name, prompt=task, sampling=_ANSWER))
        made.share(START, name).add_edge(PARENT, name).add_edge(name, END)
    return made


def _task(name: str, state: Mapping[str, Any]) -> str:
    return str(state["tasks"][name])
