"""Whom an agent may run after and does not see: told once, when its graph is compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from langgraph.graph import StateGraph

from choreo_agents.graph.audit import Chart

_NAMED = 10
"""Pairs that a note tells by name."""


def note_unseen(builder: StateGraph[Any, Any, Any, Any], chart: Chart) -> None:
    """Say which agents may run after others of which nothing is declared to them, and what would change it."""
    pairs = list(unseen_pairs(builder, chart))
    if not pairs:
        return
    lines = [
        f"{reader!r} may run after {source!r} and does not see it: graph.share({source!r}, {reader!r})"
        for source, reader in pairs[:_NAMED]
    ]
    if len(pairs) > _NAMED:
        lines.append(f"and {len(pairs) - _NAMED} more pairs")
    lines.append('Everyone sees everyone by ChoreoGraph(visibility="shared"); what is declared private is not noted')
    logging.getLogger(__name__).warning("\n".join(lines))


def unseen_pairs(builder: StateGraph[Any, Any, Any, Any], chart: Chart) -> Iterator[tuple[str, str]]:
    """Every (source, reader) of a graph's own nodes of which one may run after the other and sees nothing of it.

    Args:
        builder: The graph. Where a route may lead anywhere it does; where a function sends control by a `Command` is
            known by its annotation alone.
        chart: The same as the audit sees it.
    """
    speakers = {name: [node for node in chart.inside(name) if not node.is_function] for name in builder.nodes}
    following = {name: set(_following(builder, name)) for name in builder.nodes}
    readers = {node.name: node for node in chart.nodes if node.name in speakers and not node.is_function}
    for reader in readers.values():
        for source, said_by in speakers.items():
            kin = any(node.persona == reader.persona for node in said_by)
            if not said_by or kin or reader.name not in reached(following, source):
                continue
            rule = reader.rules.get(source)
            hidden = source in reader.undeclared and all(node.confidential for node in said_by)
            if rule is None or hidden:
                yield source, reader.name


def _following(builder: StateGraph[Any, Any, Any, Any], name: str) -> Iterator[str]:
    """The nodes that may run next."""
    yield from (end for start, end in builder.edges if start == name)
    yield from (end for starts, end in builder.waiting_edges if name in starts)
    for branch in builder.branches.get(name, {}).values():
        yield from builder.nodes if branch.ends is None else branch.ends.values()
    spec = builder.nodes[name]
    yield from spec.ends or ()
    if spec.error_handler_node is not None:
        yield spec.error_handler_node


def reached(following: dict[str, set[str]], name: str) -> set[str]:
    """All that may run after a node, END too."""
    found: set[str] = set()
    queue = [name]
    for node in queue:
        for after in following.get(node, set()) - found:
            found.add(after)
            queue.append(after)
    return found
