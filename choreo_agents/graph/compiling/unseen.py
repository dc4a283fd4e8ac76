"""Whom an agent may run after and does not see: told once, when its graph is compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from langgraph.graph import StateGraph

from choreo_agents.graph.audit import Chart
from choreo_agents.graph.audit.closure import ahead, bits, turned
from choreo_agents.graph.compiling.steps import steps

_NAMED = 10
"""Pairs that a note tells by name."""


def note_unseen(builder: StateGraph[Any, Any, Any, Any], chart: Chart) -> None:
    """Say which agents may run after others of which nothing is declared to them, and what would change it."""
    pairs = unseen_pairs(builder, chart)
    lines = [
        f"{reader!r} may run after {source!r} and does not see it: graph.share({source!r}, {reader!r})"
        for source, reader in islice(pairs, _NAMED)
    ]
    if not lines:
        return
    if more := sum(1 for _ in pairs):
        lines.append(f"and {more} more pairs")
    lines.append('Everyone sees everyone by ChoreoGraph(visibility="shared"); what is declared private is not noted')
    logging.getLogger(__name__).warning("\n".join(lines))


def unseen_pairs(builder: StateGraph[Any, Any, Any, Any], chart: Chart) -> Iterator[tuple[str, str]]:
    """Every (source, reader) of a graph's own nodes of which one may run after the other and sees nothing of it.

    Args:
        builder: The graph. Where a route may lead anywhere it does; where a function sends control by a `Command` is
            known by its annotation alone.
        chart: The same as the audit sees it.
    """
    names = list(builder.nodes)
    speakers = {name: [node for node in chart.inside(name) if not node.is_function] for name in names}
    kin: dict[str, set[str]] = {}
    for name, said_by in speakers.items():
        for node in said_by:
            kin.setdefault(node.persona, set()).add(name)
    before = ahead(turned(steps(names, _following(builder))))
    for number, name in enumerate(names):
        reader = next((node for node in speakers[name] if node.name == name), None)
        if reader is None:
            continue
        for source in map(names.__getitem__, bits(before[number])):
            if not speakers[source] or source in kin[reader.persona]:
                continue
            rule = reader.rules.get(source)
            hidden = source in reader.undeclared and all(node.confidential for node in speakers[source])
            if rule is None or hidden:
                yield source, reader.name


def _following(builder: StateGraph[Any, Any, Any, Any]) -> Iterator[tuple[str, Iterable[str]]]:
    """What may run after which node; nodes may come more than once."""
    yield from ((start, (end,)) for start, end in builder.edges)
    yield from ((start, (end,)) for starts, end in builder.waiting_edges for start in starts)
    for name, branches in builder.branches.items():
        yield from (
            (name, builder.nodes if branch.ends is None else branch.ends.values()) for branch in branches.values()
        )
    for name, spec in builder.nodes.items():
        yield name, spec.ends or ()
        if spec.error_handler_node is not None:
            yield name, (spec.error_handler_node,)
