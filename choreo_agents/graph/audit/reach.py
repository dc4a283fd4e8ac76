"""Computes how far private contexts spread: a fixed point over the edges of a chart, loops included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from choreo_agents.graph.audit.chart import Chart, Edge
from choreo_agents.graph.audit.closure import propagate
from choreo_agents.graph.audit.report import Hop, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel, Presence, VisibilityMode

PRESENCES: tuple[Presence, ...] = ("text", "encoding", "words")


class State(NamedTuple):
    """A node, and the form in which it has a context."""

    node: str
    presence: Presence


@dataclass
class Reach:
    """All states that one context reaches, each with the hop by which it was first reached: the readable form of the
    audit.

    Its paths are the shortest. `JointReach` computes the same for all contexts at once, without paths.
    """

    context: PrivateContext
    came_by: dict[State, tuple[State | None, str, str]]
    """For each state, the state before it, and the source and label of the hop; an empty label: the context starts
    there."""

    def has(self, node: str, channel: Channel) -> bool:
        return State(node, channel) in self.came_by

    def path(self, node: str, channel: Channel) -> tuple[Hop, ...]:
        """Return the shortest path to a node: hops from the context on."""
        hops: list[Hop] = []
        state: State | None = State(node, channel)
        while state is not None:
            before, source, label = self.came_by[state]
            if label:
                hops.append(Hop(source=source, reader=state.node, by=label))
            state = before
        return tuple(reversed(hops))


def reach(chart: Chart, context: PrivateContext) -> Reach:
    """Follow a context along every edge until nothing new is reached, breadth first."""
    came_by: dict[State, tuple[State | None, str, str]] = {}
    queue: list[State] = []

    def visit(state: State, before: State | None, source: str, label: str) -> None:
        if state not in came_by:
            came_by[state] = before, source, label
            queue.append(state)

    for state, source, label in _starts(chart, context):
        visit(state, None, source, label)
    for state in queue:
        for after, source, label in _next_states(chart, state):
            visit(after, state, source, label)
    return Reach(context, came_by)


class JointReach:
    """Reachability of many contexts at once, without paths.

    Args:
        chart: The graph.
        contexts: The contexts; bit i of a mask is the i-th of them.
    """

    def __init__(self, chart: Chart, contexts: Sequence[PrivateContext]) -> None:
        self._places = {node.name: place for place, node in enumerate(chart.nodes)}
        initial = [0] * self._number(len(self._places), "text")
        for number, context in enumerate(contexts):
            for (node, presence), _, _ in _starts(chart, context):
                initial[self._number(self._places[node], presence)] |= 1 << number
        self._masks = propagate(self._successors(chart), initial)

    def _number(self, place: int, presence: Presence) -> int:
        """Return the number of a state."""
        return len(PRESENCES) * place + PRESENCES.index(presence)

    def _successors(self, chart: Chart) -> list[list[int]]:
        """Return the successors of each state, as `_next_states` has them; computed once per kind of edge, of which
        there are few."""
        opened: dict[tuple[VisibilityMode | None, bool, bool], list[list[int]]] = {}
        successors: list[list[int]] = []
        for node in chart.nodes:
            after: list[list[int]] = [[] for _ in PRESENCES]
            for edge in chart.outgoing.get(node.name, ()):
                kind = edge.mode, edge.may_be_sent, edge.is_alone
                if kind not in opened:
                    opened[kind] = [[PRESENCES.index(to) for to, _ in edge.opens(presence)] for presence in PRESENCES]
                first = len(PRESENCES) * self._places[edge.reader]
                for index, channels in enumerate(opened[kind]):
                    after[index] += [first + channel for channel in channels]
            for index, presence in enumerate(PRESENCES):
                scoped = _scoped(chart, State(node.name, presence))
                after[index] += [self._number(self._places[to.node], to.presence) for to, _, _ in scoped]
            successors += after
        return successors

    def at(self, node: str, channel: Channel) -> int:
        """Return the contexts that reach a node through a channel, as a bit mask."""
        return self._masks[self._number(self._places[node], channel)]


def _next_states(chart: Chart, state: State) -> Iterator[tuple[State, str, str]]:
    """Yield the states that a context reaches from a state in one hop, with source and label."""
    node, presence = state
    for edge in chart.outgoing.get(node, ()):
        for channel, label in edge.opens(presence):
            yield State(edge.reader, channel), node, label
    yield from _scoped(chart, state)


def _scoped(chart: Chart, state: State) -> Iterator[tuple[State, str, str]]:
    """Yield the same for rules that encode text in the node's messages as a named context."""
    node, presence = state
    for source, reader in chart.scopes.get(node, ()):
        if node != reader:
            # The named message is encoded again for the reader.
            for channel in REENCODED.opens(presence):
                yield State(reader, channel), node, _scope(source)


def _starts(chart: Chart, context: PrivateContext) -> Iterator[tuple[State, str, str]]:
    """Yield the states in which a context begins, with the source and the label of the first hop, if it takes one."""
    name = context.name
    if name == START_SOURCE:
        # Input has no author: its readers attend to it, as it was encoded or in a fresh encoding.
        for node in chart.nodes:
            rule = node.rules.get(START_SOURCE)
            if node.is_function or (rule is not None and rule.mode.shows):
                yield State(node.name, "encoding"), name, "state" if rule is None else rule.words()
        return
    if context.kind == "message":
        # A private source may be a whole graph: then all its messages are the text.
        for speaker in chart.inside(name):
            yield State(speaker.name, "text"), name, ""
        return
    if context.kind == "thoughts":
        thinker = chart.by_name[name.removesuffix(".thoughts")]
        # No other node attends to thoughts, but the answer was decoded from them.
        yield State(thinker.name, "words"), name, "own"
        if thinker.recalls:
            for owner in context.owners:
                if thinker.speaks_to(chart.by_name[owner]):
                    yield State(owner, "encoding"), name, "own"
        return
    # A prompt of one node stands before its answer in the views of all nodes of the persona, on their own models.
    is_asked = any(chart.by_name[owner].has_prompt for owner in context.owners)
    for owner in context.owners:
        node = chart.by_name[owner]
        if name in node.modules if context.kind == "module" else node.has_system or is_asked:
            yield State(owner, "encoding"), name, "own"
    for source, reader in chart.scopes.get(name, ()):
        yield State(reader, "encoding"), name, _scope(source)


def _scope(source: str) -> str:
    return f"scope of {source}"


def nearest(chart: Chart, reached: Reach, persona: str, channel: Channel) -> str | None:
    """Return the node of a persona that a context reaches by the shortest path; None if it reaches none."""
    nodes = [node.name for node in chart.of_persona(persona) if reached.has(node.name, channel)]
    return min(nodes, key=lambda node: len(reached.path(node, channel)), default=None)


def cut(chart: Chart, reached: Reach, reader: str, channel: Channel) -> tuple[tuple[str, str], ...]:
    """Return edges that would keep a context from a persona: one if one is enough, nearest to the reader first.

    Encodings are cut by switching edges to `reencoded`, text by leaving edges undeclared.

    Args:
        chart: The graph.
        reached: The context's reach.
        reader: The persona.
        channel: The channel to cut.
    """
    node = nearest(chart, reached, reader, channel)
    path = () if node is None else reached.path(node, channel)
    declared = {(edge.source, edge.reader): edge for edge in chart.edges() if edge.declared is not None}
    singles = [declared[hop.source, hop.reader] for hop in reversed(path) if (hop.source, hop.reader) in declared]
    kin = {node.name for node in chart.of_persona(reader)}
    into = [edge for edge in declared.values() if edge.reader in kin]

    def cuts(edges: Sequence[Edge]) -> bool:
        changed = chart
        for edge in edges:
            assert edge.declared is not None
            source, to = edge.declared
            changed = changed.with_rule(source, to, chart.by_name[to].rules[source].without(channel))
        return nearest(changed, reach(changed, reached.context), reader, channel) is None

    for edges in [*([edge] for edge in singles), into]:
        useful = [edge for edge in edges if channel == "words" or edge.shares_kv]
        if not useful or not cuts(useful):
            continue
        for edge in list(useful):
            # Drop the edges that are not needed for the cut.
            if len(useful) > 1 and cuts([candidate for candidate in useful if candidate is not edge]):
                useful.remove(edge)
        return tuple(dict.fromkeys(edge.declared for edge in useful if edge.declared is not None))
    return ()
