"""Starts synthesizers that have a quorum together with the branches that they merge.

LangGraph runs a node after the superstep of those before it. So that one can start when some of its branches are in, a
compiled graph runs it in their superstep: whatever starts them starts it, too, and their edges to it are left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langgraph.graph import StateGraph
from langgraph.types import Command, Send

from choreo_agents.errors import VisibilityError
from choreo_agents.graph.langgraph_internals import BranchSpec, policies_of
from choreo_agents.graph.quorum.board import Reporting
from choreo_agents.graph.quorum.gathering import QuorumPlan, expecting
from choreo_agents.graph.sending import sent_speaker
from choreo_agents.graph.turn.turn import Speaker
from choreo_agents.graph.turn.updating import Update
from choreo_agents.graph.view.merged_branches import MergeSpec

Builder = StateGraph[Any, Any, Any, Any]


class Reporter(Speaker, Protocol):
    """An agent that a synthesizer may hear of."""

    update: Update | None

    def reporting(self, reporting: Reporting, /) -> Any:
        """A copy that is heard of in its own superstep."""
        ...


class Gatherer(Protocol):
    """A synthesizer that has a quorum."""

    merging: MergeSpec | None

    def gathering(self, plan: QuorumPlan, /) -> Any:
        """A copy that keeps its quorum as planned."""
        ...


@dataclass(frozen=True)
class _Origins:
    """What starts a node: nodes before it, and groups of nodes that must all be done."""

    plain: frozenset[str]
    waiting: frozenset[tuple[str, ...]]


class _Route(Runnable[Any, Any]):
    """A route that also starts the synthesizers of the branches that it starts; without a path, always.

    Args:
        path: The graph's own route.
        ends: Its targets by what it returns; None: it returns them.
        sources: By synthesizer, whom it merges.
    """

    def __init__(
        self,
        path: Runnable[Any, Any] | None,
        ends: Mapping[Hashable, str] | None,
        sources: Mapping[str, frozenset[str]],
    ) -> None:
        self.path = path
        self.ends = ends
        self.sources = sources

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Any:
        return self._extended([] if self.path is None else self.path.invoke(input, config))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> Any:
        return self._extended([] if self.path is None else await self.path.ainvoke(input, config))

    def _extended(self, result: Any) -> list[Any]:
        targets = list(result) if isinstance(result, list | tuple) else [result]
        if self.path is None:
            return [Send(name, expecting(None)) for name in self.sources]
        named = {
            target if self.ends is None else self.ends.get(target) for target in targets if not isinstance(target, Send)
        }
        sent = [target for target in targets if isinstance(target, Send)]
        for name, merged in self.sources.items():
            told = [target.arg for target in sent if target.node in merged]
            count = len(named & merged) + len(told)
            speakers = filter(None, map(sent_speaker, told))
            targets += [Send(name, expecting(count, speakers))] if count else []
        return targets


def _require_no_command(output: Any, node: str, sources: Mapping[str, frozenset[str]]) -> Any:
    """A node's output; raises if it is a Command that starts branches, whose synthesizer it would not start."""
    for command in output if isinstance(output, list | tuple) else [output]:
        if isinstance(command, Command) and command.graph is None:
            goto = command.goto if isinstance(command.goto, list | tuple) else [command.goto]
            for target in (each.node if isinstance(each, Send) else each for each in goto):
                for name, merged in sources.items():
                    if target == name or target in merged:
                        raise _commanded(name, node, target)
    return output


def rewire(
    bound: Builder,
    agents: Mapping[str, Reporter],
    synthesizers: Mapping[str, Gatherer],
    stops: Mapping[str, Sequence[str]],
) -> None:
    """Let the synthesizers of a graph that have a quorum start together with their branches.

    Args:
        bound: The graph, with bound agents; it is changed.
        agents: All its agents, by node; and `synthesizers`, those that have a quorum.
        stops: Where it is interrupted: `before` and `after`.

    Raises:
        VisibilityError: They cannot run in one superstep.
    """
    if not synthesizers:
        return
    sources = {name: _merged(bound, name, agents, synthesizers) for name in synthesizers}
    started = {name: _require_one_start(bound, name, merged) for name, merged in sources.items()}
    for name, merged in sources.items():
        _require_no_detour(bound, name, merged, stops)
    schema = bound.state_schema
    for each, spec in bound.nodes.items():
        runnable: Any = spec.runnable
        if each in synthesizers:
            merged_agents = {source: agents[source] for source in sources[each]}
            plan = QuorumPlan(merged_agents, len(synthesizers), schema, tuple(bound.schemas[schema]))
            runnable = synthesizers[each].gathering(plan)
        elif any(each in merged for merged in sources.values()):
            runnable = agents[each].reporting(_reporting(bound, each))
        elif each not in agents or agents[each].update is not None:
            check = partial(_require_no_command, node=each, sources=sources)
            runnable = runnable | RunnableLambda(check, name=f"commands of {each}")
        bound.nodes[each] = replace(spec, runnable=runnable)
    for name, merged in sources.items():
        bound.edges -= {(each, name) for each in merged}
        bound.waiting_edges -= {(starts, end) for starts, end in bound.waiting_edges if end == name}
        _start(bound, name, started[name])
    _extend_routes(bound, sources)


def _merged(
    bound: Builder, name: str, agents: Mapping[str, Reporter], synthesizers: Mapping[str, Gatherer]
) -> frozenset[str]:
    """The nodes that a synthesizer merges."""
    merging = synthesizers[name].merging
    assert merging is not None
    for source in merging.sources:
        if source not in agents:
            known = source in bound.nodes
            what = "is no agent: nobody hears it while its superstep lasts" if known else "is no node"
            raise _refused(name, f"it merges {source!r}, which {what}. Merge agents of this graph")
        if agents[source].update is not None:
            raise _refused(
                name, f"{source!r} has an update, which may send control elsewhere: give it to a node behind"
            )
        if source == name or source in synthesizers:
            raise _refused(name, f"it merges {source!r}, which has a quorum itself: give that one quorum=None")
        if policies_of(bound, source).is_cached:
            raise _refused(
                name, f"{source!r} has a cache policy, its own or the graph's: what is cached is not run. Leave it out"
            )
        if bound.nodes[source].defer:
            raise _refused(name, f"{source!r} is deferred: leave defer out")
    if policies_of(bound, name).is_cached:
        why = (
            "it has a cache policy, its own or the graph's: what starts it is the same for all questions. Leave it out"
        )
        raise _refused(name, why)
    if bound.nodes[name].defer:
        raise _refused(name, "it is deferred: leave defer out")
    return merging.sources


def _require_one_start(bound: Builder, name: str, merged: frozenset[str]) -> _Origins:
    """What starts all branches alike; raises if that differs."""
    first, *rest = sorted(merged)
    origins = _origins(bound, first)
    for source in sorted(merged):
        behind = (
            _origins(bound, source).plain | {s for each in _origins(bound, source).waiting for s in each}
        ) & merged
        if behind:
            raise _refused(
                name, f"{source!r} runs after {min(behind)!r}, which it merges, too: merge the last one only"
            )
    for other in rest:
        if _origins(bound, other) != origins:
            raise _refused(
                name,
                f"{first!r} and {other!r} are not started from the same nodes: give them edges from the same ones, or "
                "one route",
            )
    if not origins.plain and not origins.waiting and not any(_leads(each, merged) for _, _, each in _routes(bound)):
        raise _refused(name, f"nothing starts {first!r}: give it an edge or a route")
    return origins


def _require_no_detour(bound: Builder, name: str, merged: frozenset[str], stops: Mapping[str, Sequence[str]]) -> None:
    """Raise if a synthesizer can also be reached otherwise than from all its branches, or if a run stops in between."""
    into = _origins(bound, name)
    reached = into.plain | {start for each in into.waiting for start in each}
    if reached - merged:
        raise _refused(name, f"it also runs after {min(reached - merged)!r}, which it does not merge: drop that edge")
    if merged - reached:
        raise _refused(name, f"{min(merged - reached)!r} has no edge to it: add one, a plain edge or a list's")
    for source, _, route in _routes(bound):
        if route.ends is not None and name in route.ends.values():
            raise _refused(name, f"a route after {source!r} leads to it: use edges from what it merges")
    for each, spec in bound.nodes.items():
        for target in spec.ends or ():
            if target == name or target in merged:
                raise _commanded(name, each, target)
    for when, nodes in stops.items():
        stopped = ({name} if when == "before" else merged) & (bound.nodes.keys() if "*" in nodes else set(nodes))
        if stopped:
            raise _refused(
                name, f"interrupt_{when} stops the run at {min(stopped)!r}, between the branches and it: stop elsewhere"
            )


def _origins(bound: Builder, node: str) -> _Origins:
    plain = frozenset(start for start, end in bound.edges if end == node)
    return _Origins(plain, frozenset(starts for starts, end in bound.waiting_edges if end == node))


def _start(bound: Builder, name: str, origins: _Origins) -> None:
    """Start a synthesizer wherever its branches are started by edges."""
    bound.waiting_edges |= {(starts, name) for starts in origins.waiting}
    for start in origins.plain:
        # What is sent runs, and writes, after what an edge has started: its message comes last, whatever its name.
        path: Any = _Route(None, None, {name: frozenset()})
        bound.branches[start][f"start {name}"] = BranchSpec(path, {name: name})


def _extend_routes(bound: Builder, sources: Mapping[str, frozenset[str]]) -> None:
    """Let each route that may start branches start whoever merges them."""
    for start, key, route in list(_routes(bound)):
        meant = {name: merged for name, merged in sources.items() if _leads(route, merged)}
        if meant and not isinstance(route.path, _Route):
            added: dict[Hashable, str] = {name: name for name in meant}
            ends = None if route.ends is None else {**route.ends, **added}
            path: Any = _Route(route.path, route.ends, meant)
            bound.branches[start][key] = route._replace(path=path, ends=ends)


def _routes(bound: Builder) -> Iterator[tuple[str, str, BranchSpec]]:
    for start, routes in bound.branches.items():
        for key, route in routes.items():
            yield start, key, route


def _leads(route: BranchSpec, merged: frozenset[str]) -> bool:
    """Whether a route may start one of these."""
    return route.ends is None or bool(merged & {*route.ends.values()})


def _reporting(bound: Builder, name: str) -> Reporting:
    policies = policies_of(bound, name)
    return Reporting(policies.retries, policies.timeout, policies.is_handled)


def _commanded(name: str, node: str, target: str) -> VisibilityError:
    return _refused(name, f"a Command of {node!r} may start {target!r} alone: use edges or a route")


def _refused(name: str, why: str) -> VisibilityError:
    return VisibilityError(f"{name!r} cannot start before all its branches are in: {why}, or leave its quorum out")
