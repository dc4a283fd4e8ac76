"""Control flow of a graph: refuses loops that cannot end, and logs pairs of agents without a declared visibility."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

from langgraph.graph import END

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.closure import bits, find_reachable, reverse_edges
from choreo_agents.graph.audit.static import audit_chart
from choreo_agents.graph.compiling.charting import DeclaringGraph
from choreo_agents.graph.visibility import EVERYONE, VisibilityRule

_LISTED = 10
"""Most pairs that a log message lists."""


def log_unseen_pairs(builder: DeclaringGraph, chart: Chart) -> None:
    """Log, once per graph shape, which agents may run after others that they do not see, and how to change that."""
    pairs = unseen_pairs(builder, chart)
    shareable = _shareable(chart, [*islice(pairs, 2 * _LISTED)])
    lines = sorted(
        f"{reader!r} may run after {source!r} and does not see it: graph.set_visibility({source!r}, {reader!r})"
        for source, reader in shareable[:_LISTED]
    )
    if not lines:
        return
    if more := len(shareable[_LISTED:]) + sum(1 for _ in pairs):
        lines.append(f"and {more} more pairs")
    lines.append('Everyone sees everyone by ChoreoGraph(visibility="shared"); what is declared private is not noted')
    _log_once("\n".join(lines))


@lru_cache(maxsize=1024)
def _log_once(note: str) -> None:
    logging.getLogger(__name__).warning(note)


def unseen_pairs(builder: DeclaringGraph, chart: Chart) -> Iterator[tuple[str, str]]:
    """Yield every (source, reader) of a graph's own nodes where the reader may run after the source, sees nothing of
    it, and no declaration says so.

    Args:
        builder: The graph. A route without known targets may lead to any node; a function's `Command` leads where its
            annotation says.
        chart: The chart of the graph.
    """
    names = list(builder.nodes)
    speakers = {name: [node for node in chart.inside(name) if not node.is_function] for name in names}
    kin: dict[str, set[str]] = {}
    for name, said_by in speakers.items():
        for node in said_by:
            kin.setdefault(node.persona, set()).add(name)
    specs = builder.nodes.items()
    jumps = ((name, [*(spec.ends or ()), *filter(None, [spec.error_handler_node])]) for name, spec in specs)
    predecessors = find_reachable(reverse_edges(_index(names, [*_successors(builder, names), *jumps])))
    for number, name in enumerate(names):
        reader = next((node for node in speakers[name] if node.name == name), None)
        if reader is None:
            continue
        for source in map(names.__getitem__, bits(predecessors[number])):
            passed = {(source, name), (source, EVERYONE)}
            if source in reader.rules or source in kin[reader.persona] or builder.control_flow & passed:
                continue
            if speakers[source] and not any(node.confidential for node in speakers[source]):
                yield source, name


def _shareable(chart: Chart, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
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
    """Raise `VisibilityError` if an agent is in a loop without an exit: its own messages alone outgrow the model's
    context.

    Nodes that may end a run or send control anywhere, by a `Command` or a route without known targets, count as exits.
    So do all functions, also those whose edges stay in the loop: any of them may `interrupt` the run, which may never
    be resumed.

    Args:
        builder: The graph.
        chart: The chart of the graph.
        stops: Nodes before or after which a run is interrupted: it goes on only if it is resumed.
    """
    nodes = {node.name: node for node in chart.nodes}
    following = [*_successors(builder, [END])]
    routed = nodes.keys() & {name for name, after in following if after}
    for name in builder.nodes:
        if name not in routed or nodes[name].is_function or nodes[name].routes or name in stops:
            following.append((name, [END]))
    leads_to = find_reachable(_index([*builder.nodes, END], following))
    for number, name in enumerate(builder.nodes):
        endless = leads_to[number] >> number & 1 and not leads_to[number] >> len(builder.nodes) & 1
        if endless and name in nodes and not nodes[name].is_function:
            raise VisibilityError(
                f"{name!r} is in a loop that nothing ends: what it sees, its own messages at least, must outgrow the "
                "model's context. Give the loop an exit"
            )


def _successors(builder: DeclaringGraph, anywhere: Collection[str]) -> Iterator[tuple[str, Collection[str]]]:
    """Yield nodes and the nodes that may run after them; a node may come more than once.

    Args:
        builder: The graph.
        anywhere: The nodes that may come after a route without known targets.
    """
    edges = [*builder.edges, *((start, end) for starts, end in builder.waiting_edges for start in starts)]
    goes_on = {start for start, end in builder.edges if end != END}
    # A node with another edge goes on in spite of its edge to END.
    yield from ((start, [end]) for start, end in edges if end != END or start not in goes_on)
    for name, branches in builder.branches.items():
        yield from ((name, anywhere if branch.ends is None else branch.ends.values()) for branch in branches.values())


def _index(names: Sequence[str], following: Iterable[tuple[str, Iterable[str]]]) -> list[list[int]]:
    """Return for each name, by its index, the indices of its successors; unknown names are left out.

    Args:
        names: All names, each once.
        following: Names, and some of the successors of each.
    """
    numbers = {name: number for number, name in enumerate(names)}
    successors: list[dict[int, None]] = [{} for _ in names]
    for start, ends in following:
        if start in numbers:
            successors[numbers[start]].update((numbers[end], None) for end in ends if end in numbers)
    return [list(row) for row in successors]
