"""Which nodes run after which: loops that cannot end are refused, and whom an agent may run after and does not see is
told, once, when its graph is compiled."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

from langgraph.graph import END

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.closure import ahead, bits, turned
from choreo_agents.graph.audit.static import audit_chart
from choreo_agents.graph.compiling.charting import DeclaringGraph
from choreo_agents.graph.visibility import EVERYONE, VisibilityRule

_NAMED = 10
"""Pairs that a note tells by name."""


def note_unseen(builder: DeclaringGraph, chart: Chart) -> None:
    """Log, once for graphs of one shape, which agents may run after others of which nothing is declared to them, and
    what would change it."""
    pairs = unseen_pairs(builder, chart)
    kept = _kept(chart, [*islice(pairs, 2 * _NAMED)])
    lines = sorted(
        f"{reader!r} may run after {source!r} and does not see it: graph.set_visibility({source!r}, {reader!r})"
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


def unseen_pairs(builder: DeclaringGraph, chart: Chart) -> Iterator[tuple[str, str]]:
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
    before = ahead(turned(_steps(names, [*_following(builder, names), *_sent(builder)])))
    for number, name in enumerate(names):
        reader = next((node for node in speakers[name] if node.name == name), None)
        if reader is None:
            continue
        for source in map(names.__getitem__, bits(before[number])):
            if (
                source in reader.rules
                or source in kin[reader.persona]
                or builder.control_flow & {(source, name), (source, EVERYONE)}
            ):
                continue
            if speakers[source] and not any(node.confidential for node in speakers[source]):
                yield source, name


def _kept(chart: Chart, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the pairs of which each can be shared without breaking a promise."""

    def broken(*shared: tuple[str, str]) -> int:
        changed = chart
        for source, reader in shared:
            changed = changed.with_rule(source, reader, VisibilityRule())
        return len(audit_chart(changed).violations)

    if not chart.guarded and not any(chart.private_pairs()):
        return pairs
    before = broken()
    return pairs if broken(*pairs) <= before else [pair for pair in pairs if broken(pair) <= before]


def require_bounded_loops(builder: DeclaringGraph, chart: Chart, stops: Container[str]) -> None:
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
    following = [*_following(builder, [END])]
    known = nodes.keys() & {name for name, after in following if after}
    for name in builder.nodes:
        if name not in known or nodes[name].is_function or nodes[name].routes or name in stops:
            following.append((name, [END]))
    leads_to = ahead(_steps([*builder.nodes, END], following))
    for number, name in enumerate(builder.nodes):
        endless = leads_to[number] >> number & 1 and not leads_to[number] >> len(builder.nodes) & 1
        if endless and name in nodes and not nodes[name].is_function:
            raise VisibilityError(
                f"{name!r} is in a loop that nothing ends: what it sees, its own messages at least, must outgrow the "
                "model's context. Give the loop an exit"
            )


def _following(builder: DeclaringGraph, anywhere: Collection[str]) -> Iterator[tuple[str, Collection[str]]]:
    """What may run after which node; nodes may come more than once.

    Args:
        builder: The graph.
        anywhere: What comes after a route of which nobody has said where it leads.
    """
    edges = [*builder.edges, *((start, end) for starts, end in builder.waiting_edges for start in starts)]
    goes_on = {start for start, end in builder.edges if end != END}
    # With an edge to END as well it goes on all the same.
    yield from ((start, [end]) for start, end in edges if end != END or start not in goes_on)
    for name, branches in builder.branches.items():
        yield from ((name, anywhere if each.ends is None else each.ends.values()) for each in branches.values())


def _sent(builder: DeclaringGraph) -> Iterator[tuple[str, Collection[str]]]:
    """The same of what nodes send, and of what handles their errors."""
    for name, spec in builder.nodes.items():
        yield name, [*(spec.ends or ()), *filter(None, [spec.error_handler_node])]


def _steps(names: Sequence[str], following: Iterable[tuple[str, Iterable[str]]]) -> list[list[int]]:
    """Of each name, by its place, the places of those that follow it; who is not named is left out.

    Args:
        names: Each once.
        following: Names, and some of what follows each.
    """
    numbers = {name: number for number, name in enumerate(names)}
    found: list[dict[int, None]] = [{} for _ in names]
    for start, ends in following:
        if start in numbers:
            found[numbers[start]].update((numbers[end], None) for end in ends if end in numbers)
    return [list(each) for each in found]
