"""Where a private context can get to: the fixed point over a chart, loops included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from choreo_agents.graph.audit.chart import Chart, Edge
from choreo_agents.graph.audit.report import Hop, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel, Presence

State = tuple[str, Presence]


@dataclass
class Reach:
    """Every (node, presence) that a context gets to, with the hop that first led there."""

    context: PrivateContext
    came_by: dict[State, tuple[State | None, Hop | None]]

    def has(self, node: str, channel: Channel) -> bool:
        return (node, channel) in self.came_by

    def path(self, node: str, channel: Channel) -> tuple[Hop, ...]:
        """The shortest way there: hops from the context on."""
        hops: list[Hop] = []
        state: State | None = (node, channel)
        while state is not None:
            state, hop = self.came_by[state]
            if hop is not None:
                hops.append(hop)
        return tuple(reversed(hops))


def reach(chart: Chart, context: PrivateContext) -> Reach:
    """Follow a context along every edge until nothing new is reached, nearest first."""
    came_by: dict[State, tuple[State | None, Hop | None]] = {}
    queue: list[State] = []

    def visit(state: State, before: State | None, hop: Hop | None) -> None:
        if state not in came_by:
            came_by[state] = (before, hop)
            queue.append(state)

    for state, hop in _starts(chart, context):
        visit(state, None, hop)
    edges = chart.edges()
    scopes = list(chart.scopes())
    for state in queue:
        node, presence = state
        for edge in edges:
            if edge.source == node:
                for after, hop in edge.opens(presence):
                    visit((edge.reader, after), state, hop)
        for source, reader, rule in scopes:
            if node in rule.contexts and node != reader:
                # The named message's words are encoded for the reader.
                for after in REENCODED.opens(presence):
                    visit((reader, after), state, _scope_hop(node, source, reader))
    return Reach(context, came_by)


def _starts(chart: Chart, context: PrivateContext) -> Iterator[tuple[State, Hop | None]]:
    if context.name == START_SOURCE:
        # Nobody says input: who reads it attends to it, as it was encoded or in a fresh encoding.
        for node in chart.nodes:
            rule = node.rules.get(START_SOURCE)
            if rule is not None and rule.mode.shows:
                yield (node.name, "encoding"), Hop(source=START_SOURCE, reader=node.name, by=rule.words())
        return
    if context.kind == "message":
        # A private source may be a whole graph: all that is said in it is the text.
        for said in chart.inside(context.name):
            yield (said.name, "text"), None
        return
    if context.kind == "thoughts":
        thinker = context.name.removesuffix(".thoughts")
        # Others never attend to them: what was said is made of them.
        yield (thinker, "words"), Hop(source=context.name, reader=thinker, by="own")
        recalling = [each for each in context.owners if chart.node(thinker).speaks_to(chart.node(each))]
        for owner in recalling if chart.node(thinker).recalls else ():
            yield (owner, "encoding"), Hop(source=context.name, reader=owner, by="own")
        return
    for owner in context.owners:
        node = chart.node(owner)
        if context.name in node.modules if context.kind == "module" else node.has_system or node.has_prompt:
            yield (owner, "encoding"), Hop(source=context.name, reader=owner, by="own")
    for source, reader, rule in chart.scopes():
        if context.name in rule.contexts:
            yield (reader, "encoding"), _scope_hop(context.name, source, reader)


def _scope_hop(context: str, source: str, reader: str) -> Hop:
    return Hop(source=context, reader=reader, by=f"scope of {source}")


def nearest(chart: Chart, found: Reach, persona: str, channel: Channel) -> str | None:
    """The node of a persona that a context gets to first; None if to none of them."""
    nodes = [node.name for node in chart.nodes if node.persona == persona and found.has(node.name, channel)]
    return min(nodes, key=lambda node: len(found.path(node, channel)), default=None)


def cut(chart: Chart, context: PrivateContext, reader: str, channel: Channel) -> tuple[tuple[str, str], ...]:
    """Edges that would keep a context from a persona: one if one is enough, the nearest to the reader first.

    Encodings are cut by switching edges to `reencoded`, words by leaving them undeclared.
    """
    whole = reach(chart, context)
    node = nearest(chart, whole, reader, channel)
    path = () if node is None else whole.path(node, channel)
    kin = {node.name for node in chart.nodes if node.persona == reader}
    declared = {(edge.source, edge.reader): edge for edge in chart.edges() if edge.declared is not None}
    singles = [declared[hop.source, hop.reader] for hop in reversed(path) if (hop.source, hop.reader) in declared]
    into = [edge for edge in declared.values() if edge.reader in kin]

    def cuts(edges: Sequence[Edge]) -> bool:
        changed = chart
        for edge in edges:
            assert edge.declared is not None
            source, to = edge.declared
            changed = changed.with_rule(source, to, chart.node(to).rules[source].without(channel))
        return nearest(changed, reach(changed, context), reader, channel) is None

    for edges in [*([edge] for edge in singles), into]:
        useful = [edge for edge in edges if channel == "words" or edge.hands_on_encodings]
        if not useful or not cuts(useful):
            continue
        for edge in list(useful):
            # Of several, those that it takes.
            if len(useful) > 1 and cuts([other for other in useful if other is not edge]):
                useful.remove(edge)
        return tuple(dict.fromkeys(edge.declared for edge in useful if edge.declared is not None))
    return ()
