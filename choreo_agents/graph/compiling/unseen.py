"""Whom an agent may run after and does not see: told once, when its graph is compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from langgraph.graph import StateGraph

from choreo_agents.graph.audit import Chart, audit_chart
from choreo_agents.graph.audit.closure import ahead, bits, turned
from choreo_agents.graph.compiling.steps import steps
from choreo_agents.graph.visibility import EVERYONE, Rule

_NAMED = 10
"""Pairs that a note tells by name."""


def note_unseen(builder: StateGraph[Any, Any, Any, Any], chart: Chart) -> None:
    """Log, once for graphs of one shape, which agents may run after others of which nothing is declared to them, and
    what would change it."""
    pairs = unseen_pairs(builder, chart)
    kept = _kept(chart, [*islice(pairs, 2 * _NAMED)])
    lines = sorted(
        f"{reader!r} may run after {source!r} and does not see it: graph.share({source!r}, {reader!r})"
        for source, reader in kept[:_NAMED]
    )
    if not lines:
        return
    if more := len(kept[_NAMED:]) + sum(1 for _ in pairs):
        lines.append(f"and {more} more pairs")
    lines.append('Everyone sees everyone by ChoreoGraph(visibility="shared"); what is declared private is not noted')
    _log_once("\n".join(lines))


@lru_cache(maxsize=1024)
def _log_once(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def unseen_pairs(builder: StateGraph[Any, Any, Any, Any], chart: Chart) -> Iterator[tuple[str, str]]:
    """Every (source, reader) of a graph's own nodes of which one may run after the other and sees nothing of it, where
    nothing says so.

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
    declared: frozenset[tuple[str, str]] = getattr(builder, "control_flow", frozenset())
    for number, name in enumerate(names):
        reader = next((node for node in speakers[name] if node.name == name), None)
        if reader is None:
            continue
        for source in map(names.__getitem__, bits(before[number])):
            if (
                source in reader.rules
                or source in kin[reader.persona]
                or declared & {(source, name), (source, EVERYONE)}
            ):
                continue
            if speakers[source] and not any(node.confidential for node in speakers[source]):
                yield source, name


def _kept(chart: Chart, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the pairs of which each can be shared without breaking a promise."""

    def broken(*shared: tuple[str, str]) -> int:
        changed = chart
        for source, reader in shared:
            changed = changed.with_rule(source, reader, Rule())
        return len(audit_chart(changed).violations)

    if not chart.guarded and not any(chart.private_pairs()):
        return pairs
    before = broken()
    return pairs if broken(*pairs) <= before else [pair for pair in pairs if broken(pair) <= before]


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
