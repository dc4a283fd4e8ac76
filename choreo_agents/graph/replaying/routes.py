"""Which nodes ran, superstep by superstep, then and now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from choreo_agents.graph.replaying.fork_player import ForkPlayer
from choreo_agents.graph.replaying.reports import RouteChange

Steps = Mapping[int, tuple[str, ...]]


def route_change(player: ForkPlayer) -> RouteChange | None:
    """Where a run went another way first; None: nowhere."""
    script = player.script
    then = _by_graph([*((each.author, each.step) for each in script.calls), *_executions(player)])
    now = _by_graph(player.made)
    for graph in sorted({*then, *now}, key=lambda name: (name.count("|") + bool(name), name)):
        recorded, made = then.get(graph, {}), now.get(graph, {})
        for step in sorted({*recorded, *made}):
            if recorded.get(step, ()) == made.get(step, ()):
                continue
            if script.is_open and step not in recorded:
                break  # the recording ends before
            before = max((each for each in recorded if each < step), default=None)
            follows = tuple(made[each] for each in sorted(made) if each > step)
            after = () if before is None else recorded[before]
            return RouteChange(script.run.run, graph, after, recorded.get(step, ()), made.get(step, ()), follows)
    return None


def _executions(player: ForkPlayer) -> Iterable[tuple[str, int]]:
    """Of functions; of attempts that failed only the last."""
    return ((each.node, each.step) for each in player.script.nodes if each.outcome != "error")


def _by_graph(nodes: Iterable[tuple[str, int]]) -> Mapping[str, Steps]:
    """The nodes of each superstep of each graph, in the order of their names."""
    found: defaultdict[str, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node, step in nodes:
        found[node.rpartition("|")[0]][step].append(node)
    return {graph: {step: tuple(sorted(names)) for step, names in steps.items()} for graph, steps in found.items()}
