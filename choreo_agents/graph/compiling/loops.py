"""Loops that cannot end, and whose views grow each time: refused before they run into the model's context."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from langgraph.graph import END, StateGraph

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit import Chart
from choreo_agents.graph.compiling.unseen import reached


def require_bounded_loops(builder: StateGraph[Any, Any, Any, Any], chart: Chart, stops: Container[str]) -> None:
    """Raise `VisibilityError` if an agent stands in a loop without an exit: its own messages alone outgrow its context.

    Nodes that may end a run or send control anywhere, by a `Command` or a route whose targets are not known, count as
    exits.

    Args:
        builder: The graph.
        chart: The same as the audit sees it.
        stops: Nodes before or after which a run is interrupted: it goes on only if somebody says so.
    """
    nodes = {node.name: node for node in chart.nodes}
    following = {
        name: _following(
            builder,
            name,
            is_function=name not in nodes or nodes[name].is_function or nodes[name].routes or name in stops,
        )
        for name in builder.nodes
    }
    ahead = {name: reached(following, name) for name in builder.nodes}
    for name, node in nodes.items():
        if name not in ahead:
            continue
        endless = name in ahead[name] and END not in ahead[name]
        if endless and not node.is_function:
            raise VisibilityError(
                f"{name!r} is in a loop that nothing ends: what it sees, its own messages at least, must outgrow the "
                "model's context. Give the loop an exit"
            )


def _following(builder: StateGraph[Any, Any, Any, Any], name: str, is_function: bool) -> set[str]:
    """The nodes that may run next; END where that is not known."""
    after = {end for start, end in builder.edges if start == name}
    # It goes on all the same.
    after = after - {END} or after
    after |= {end for starts, end in builder.waiting_edges if name in starts}
    for branch in builder.branches.get(name, {}).values():
        after |= set(branch.ends.values()) if branch.ends is not None else {END}
    # A function may send control anywhere.
    return after | {END} if is_function or not after else after
