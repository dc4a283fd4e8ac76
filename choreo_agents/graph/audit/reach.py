"""Where a private context can get to: the fixed point over a chart, loops included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from choreo_agents.graph.audit.chart import Chart, Edge
from choreo_agents.graph.audit.closure import arrived
from choreo_agents.graph.audit.report import Hop, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel, Presence, VisibilityMode

PRESENCES: tuple[Presence, ...] = ("text", "encoding", "words")


class State(NamedTuple):
    """A node, and how it has a context."""

    node: str
    presence: Presence


@dataclass
class Reach:
    """Every state that one context gets to, with the hop that first led there: the audit as it is read.

    Its paths are the shortest. `JointReach` says the same of all contexts at once, without the paths.
    """

    context: PrivateContext
    came_by: dict[State, tuple[State | None, str, str]]
    """By state, that before it, and the source and the label of the hop; no label: it begins there."""

    def has(self, node: str, channel: Channel) -> bool:
        return State(node, channel) in self.came_by

    def path(self, node: str, channel: Channel) -> tuple[Hop, ...]:
        """The shortest way there: hops from the context on."""
        hops: list[Hop] = []
        state: State | None = State(node, channel)
        while state is not None:
            before, source, label = self.came_by[state]
            if label:
                hops.append(Hop(source=source, reader=state.node, by=label))
            state = before
        return tuple(reversed(hops))


def reach(chart: Chart, context: PrivateContext) -> Reach:
    """Follow a context along every edge until nothing new is reached, nearest first."""
    came_by: dict[State, tuple[State | None, str, str]] = {}
    queue: list[State] = []

    def visit(state: State, before: State | None, source: str, label: str) -> None:
        if state not in came_by:
            came_by[state] = before, source, label
            queue.append(state)

    for state, source, label in _starts(chart, context):
        visit(state, None, source, label)
    for state in queue:
        for after, source, label in _after(chart, state):
            visit(after, state, source, label)
    return Reach(context, came_by)


class JointReach:
    """Which of many contexts get where.

    Args:
        chart: The graph.
        contexts: Known by their places from then on, as bits of a set.
    """

    def __init__(self, chart: Chart, contexts: Sequence[PrivateContext]) -> None:
        self._places = {node.name: place for place, node in enumerate(chart.nodes)}
        held = [0] * self._number(len(self._places), "text")
        for number, context in enumerate(contexts):
            for (node, presence), _, _ in _starts(chart, context):
                held[self._number(self._places[node], presence)] |= 1 << number
        self._arrived = arrived(self._following(chart), held)

    def _number(self, place: int, presence: Presence) -> int:
        """Of a state."""
        return len(PRESENCES) * place + PRESENCES.index(presence)

    def _following(self, chart: Chart) -> list[list[int]]:
        """What comes after each state, as `_after` says; by kind of edge, of which there are few."""
        opened: dict[tuple[VisibilityMode | None, bool, bool], list[list[int]]] = {}
        found: list[list[int]] = []
        for node in chart.nodes:
            after: list[list[int]] = [[] for _ in PRESENCES]
            for edge in chart.outgoing.get(node.name, ()):
                kind = edge.mode, edge.may_be_sent, edge.is_alone
                if kind not in opened:
                    opened[kind] = [[PRESENCES.index(to) for to, _ in edge.opens(has)] for has in PRESENCES]
                first = len(PRESENCES) * self._places[edge.reader]
                for has, channels in enumerate(opened[kind]):
                    after[has] += [first + channel for channel in channels]
            for has, presence in enumerate(PRESENCES):
                scoped = _scoped(chart, State(node.name, presence))
                after[has] += [self._number(self._places[to.node], to.presence) for to, _, _ in scoped]
            found += after
        return found

    def at(self, node: str, channel: Channel) -> int:
        """The contexts that get to a node through a channel, as bits."""
        return self._arrived[self._number(self._places[node], channel)]


def _after(chart: Chart, state: State) -> Iterator[tuple[State, str, str]]:
    """How a context gets on from a state: to which, from what source, and by what."""
    node, presence = state
    for edge in chart.outgoing.get(node, ()):
        for channel, label in edge.opens(presence):
            yield State(edge.reader, channel), node, label
    yield from _scoped(chart, state)


def _scoped(chart: Chart, state: State) -> Iterator[tuple[State, str, str]]:
    """The same through rules that name what is said as a context."""
    node, presence = state
    for source, reader in chart.scopes.get(node, ()):
        if node != reader:
            # The named message's words are encoded for the reader.
            for channel in REENCODED.opens(presence):
                yield State(reader, channel), node, _scope(source)


def _starts(chart: Chart, context: PrivateContext) -> Iterator[tuple[State, str, str]]:
    """Where a context is from the first: the state, and the source and the label of the hop there, if it takes one."""
    name = context.name
    if name == START_SOURCE:
        # Nobody says input: who reads it attends to it, as it was encoded or in a fresh encoding.
        for node in chart.nodes:
            rule = node.rules.get(START_SOURCE)
            if node.is_function or (rule is not None and rule.mode.shows):
                yield State(node.name, "encoding"), name, "state" if rule is None else rule.words()
        return
    if context.kind == "message":
        # A private source may be a whole graph: all that is said in it is the text.
        for said in chart.inside(name):
            yield State(said.name, "text"), name, ""
        return
    if context.kind == "thoughts":
        thinker = chart.node(name.removesuffix(".thoughts"))
        # Others never attend to them: what was said is made of them.
        yield State(thinker.name, "words"), name, "own"
        if thinker.recalls:
            for owner in context.owners:
                if thinker.speaks_to(chart.node(owner)):
                    yield State(owner, "encoding"), name, "own"
        return
    # What one node of a persona was asked stands before its message in the views of all of them, on their own models.
    is_asked = any(chart.node(owner).has_prompt for owner in context.owners)
    for owner in context.owners:
        node = chart.node(owner)
        if name in node.modules if context.kind == "module" else node.has_system or is_asked:
            yield State(owner, "encoding"), name, "own"
    for source, reader in chart.scopes.get(name, ()):
        yield State(reader, "encoding"), name, _scope(source)


def _scope(source: str) -> str:
    return f"scope of {source}"


def nearest(chart: Chart, found: Reach, persona: str, channel: Channel) -> str | None:
    """The node of a persona that a context gets to first; None if to none of them."""
    nodes = [node.name for node in chart.of_persona(persona) if found.has(node.name, channel)]
    return min(nodes, key=lambda node: len(found.path(node, channel)), default=None)


def cut(chart: Chart, whole: Reach, reader: str, channel: Channel) -> tuple[tuple[str, str], ...]:
    """Edges that would keep a context from a persona: one if one is enough, the nearest to the reader first.

    Encodings are cut by switching edges to `reencoded`, words by leaving them undeclared.

    Args:
        chart: The graph.
        whole: Where the context gets to.
        reader: The persona.
        channel: Through which it gets there.
    """
    node = nearest(chart, whole, reader, channel)
    path = () if node is None else whole.path(node, channel)
    declared = {(edge.source, edge.reader): edge for edge in chart.edges() if edge.declared is not None}
    singles = [declared[hop.source, hop.reader] for hop in reversed(path) if (hop.source, hop.reader) in declared]
    kin = {node.name for node in chart.of_persona(reader)}
    into = [edge for edge in declared.values() if edge.reader in kin]

    def cuts(edges: Sequence[Edge]) -> bool:
        changed = chart
        for edge in edges:
            assert edge.declared is not None
            source, to = edge.declared
            changed = changed.with_rule(source, to, chart.node(to).rules[source].without(channel))
        return nearest(changed, reach(changed, whole.context), reader, channel) is None

    for edges in [*([edge] for edge in singles), into]:
        useful = [edge for edge in edges if channel == "words" or edge.shares_kv]
        if not useful or not cuts(useful):
            continue
        for edge in list(useful):
            # Of several, those that it takes.
            if len(useful) > 1 and cuts([other for other in useful if other is not edge]):
                useful.remove(edge)
        return tuple(dict.fromkeys(edge.declared for edge in useful if edge.declared is not None))
    return ()
