"""Loops that cannot end, and whose views grow each time: refused before they run into the model's context."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from langgraph.graph import END, StateGraph

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit import Chart
from choreo_agents.graph.audit.closure import ahead
from choreo_agents.graph.compiling.steps import steps


def require_bounded_loops(builder: StateGraph[Any, Any, Any, Any], chart: Chart, stops: Container[str]) -> None:
    """Raise `VisibilityError` if an agent stands in a loop without an exit: its own messages alone outgrow its context.

    Nodes that may end a run or send control anywhere, by a `Command` or a route whose targets are not known, count as
    exits. So do all functions, also those whose edges stay in the loop: any of them may `interrupt` the run, and
    what it waits for may never come.

    Args:
        builder: The graph.
        chart: The same as the audit sees it.
        stops: Nodes before or after which a run is interrupted: it goes on only if somebody says so.
    """
    nodes = {node.name: node for node in chart.nodes}
    names = [*builder.nodes, END]
    anywhere = {
        name
        for name in builder.nodes
        if name not in nodes or nodes[name].is_function or nodes[name].routes or name in stops
    }
    leads_to = ahead(steps(names, _following(builder, anywhere)))
    for number, name in enumerate(builder.nodes):
        endless = leads_to[number] >> number & 1 and not leads_to[number] >> len(builder.nodes) & 1
        if endless and name in nodes and not nodes[name].is_function:
            raise VisibilityError(
                f"{name!r} is in a loop that nothing ends: what it sees, its own messages at least, must outgrow the "
                "model's context. Give the loop an exit"
            )


def _following(builder: StateGraph[Any, Any, Any, Any], anywhere: Container[str]) -> Iterator[tuple[str, set[str]]]:
    """Each node, and those that may run next; END where that is not known.

    Args:
        builder: The graph.
        anywhere: Nodes that may send control anywhere.
    """
    found: dict[str, set[str]] = {name: set() for name in builder.nodes}
    for start, end in builder.edges:
        found.setdefault(start, set()).add(end)
    for name, after in found.items():
        # It goes on all the same.
        found[name] = after - {END} or after
    for starts, end in builder.waiting_edges:
        for start in starts:
            found[start].add(end)
    for name, branches in builder.branches.items():
        for branch in branches.values():
            found.setdefault(name, set()).update({END} if branch.ends is None else branch.ends.values())
    for name, after in found.items():
        yield name, after | {END} if name in anywhere or not after else after
