"""The stock team with our nodes: it stands beside `lab/rivals/stock_team.py`, line for line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from choreo_agents.graph import END, START, Agent, ChoreoGraph, Command
from choreo_agents.graph.visibility import Mode


def team(told: Mapping[str, str]) -> ChoreoGraph:
    """The graph; `told` are system prompts by name."""

    def goto(said: Any) -> Command[Literal["Alice", "Bruno", "Clara"]]:
        return Command(goto=said.text)

    graph = ChoreoGraph(visibility="shared")
    unseen: dict[str, Mode] = {"supervisor": "private"}
    who = ["Alice", "Bruno", "Clara"]
    graph.add_node(Agent("supervisor", system=told["supervisor"], choices=who, update=goto))
    graph.add_node(Agent("Alice", system=told["Alice"], reads=unseen))
    graph.add_node(Agent("Bruno", system=told["Bruno"], reads=unseen))
    graph.add_node(Agent("Clara", system=told["Clara"], reads=unseen))
    graph.add_edge(START, "supervisor")
    graph.add_edge("Alice", "supervisor")
    graph.add_edge("Bruno", "supervisor")
    graph.add_edge("Clara", END)
    return graph
