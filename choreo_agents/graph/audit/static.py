"""Audits a graph before it runs, and re-encodes edges or raises where a path would break a promise."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import product
from typing import NamedTuple

from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.chart import Chart, ChartNode, Edge, OnViolation, is_inside, names_of
from choreo_agents.graph.audit.report import AuditReport, Blocked, Finding, Hop, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel, Presence

CHANNELS: tuple[Channel, ...] = ("encoding", "words")


# How far a context spreads: a fixed point over the edges of a chart, loops included


class State(NamedTuple):
    """A node, and the form in which it has a context."""

    node: str
    presence: Presence


@dataclass
class Reach:
    """All states that one context reaches, each with the hop by which it was first reached, so that paths are the
    shortest."""

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
    for state, source, label in _starts(chart, context):
        came_by.setdefault(state, (None, source, label))
    queue = list(came_by)
    for state in queue:
        for after, source, label in _next_states(chart, state):
            if after not in came_by:
                came_by[after] = state, source, label
                queue.append(after)
    return Reach(context, came_by)


def _next_states(chart: Chart, state: State) -> Iterator[tuple[State, str, str]]:
    """Yield the states that a context reaches from a state in one hop, with source and label."""
    node, presence = state
    for edge in chart.outgoing.get(node, ()):
        for channel, label in edge.opens(presence):
            yield State(edge.reader, channel), node, label
    for source, reader in chart.scopes.get(node, ()):
        if node != reader:
            # A rule names the node's messages as the context in which it encodes text: they are encoded again, too.
            for channel in REENCODED.opens(presence):
                yield State(reader, channel), node, f"scope of {source}"


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
        yield State(reader, "encoding"), name, f"scope of {source}"


def nearest(chart: Chart, reached: Reach, persona: str, channel: Channel) -> str | None:
    """Return the node of a persona that a context reaches by the shortest path; None if it reaches none."""
    nodes = [node.name for node in chart.by_persona[persona] if reached.has(node.name, channel)]
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
    kin = {node.name for node in chart.by_persona[reader]}
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


# The report


def audit_chart(chart: Chart, changed: Iterable[Hop] = ()) -> AuditReport:
    """Report every private context, every reader it can reach by the shortest path, and the edges that would cut it."""
    find, find_blocked = partial(_findings, chart, chart.contexts), partial(_blocked, chart)
    violations = partial(violations_of, chart)
    return AuditReport(chart.contexts, find, find_blocked, chart.outside, tuple(changed), violations)


def violations_of(chart: Chart) -> list[Finding]:
    """Return the findings that break a promise, without computing all others."""
    return [finding for finding in _findings(chart, chart.guarded) if finding.violation]


def _findings(chart: Chart, contexts: Sequence[PrivateContext]) -> Iterator[Finding]:
    """Yield those of the contexts that reach each persona, and the private sources whose encodings reach a reader
    through other nodes all the same."""
    pairs = [*chart.private_pairs()]
    members = {source: tuple(node.name for node in chart.inside(source)) for source, _ in pairs}
    sources = {source: PrivateContext(source, "message", names) for source, names in members.items()}
    masks = _reach_jointly(chart, [*contexts, *sources.values()])
    reach_of = lru_cache(maxsize=1)(partial(reach, chart))
    personas = dict.fromkeys(node.persona for node in chart.nodes if not node.is_function)
    reached = dict.fromkeys(product(personas, CHANNELS), 0)
    for persona, channel in reached:
        for node in chart.by_persona[persona]:
            reached[persona, channel] |= masks.get(State(node.name, channel), 0)

    def finding(context: PrivateContext, persona: str, channel: Channel, violation: str, node: str = "") -> Finding:
        """Return the finding that a context reaches a persona, or one node of it."""

        def path() -> tuple[Hop, ...]:
            target = node or nearest(chart, reach_of(context), persona, channel)
            assert target is not None, "it gets there"
            return reach_of(context).path(target, channel)

        def edges() -> tuple[tuple[str, str], ...]:
            return cut(chart, reach_of(context), persona, channel)

        return Finding(context.name, node or persona, channel, violation, persona, path, edges)

    for number, context in enumerate(contexts):
        owners = {chart.by_name[owner].persona for owner in context.owners}
        for (persona, channel), mask in reached.items():
            if mask >> number & 1 and persona not in owners:
                yield finding(context, persona, channel, chart.violation_of(context, persona, channel))
    numbers = {source: len(contexts) + number for number, source in enumerate(sources)}
    for source, reader in pairs:
        if masks.get(State(reader, "encoding"), 0) >> numbers[source] & 1:
            violation, persona = f"{source!r} is declared private to {reader!r}", chart.by_name[reader].persona
            yield finding(sources[source], persona, "encoding", violation, reader)


def _reach_jointly(chart: Chart, contexts: Sequence[PrivateContext]) -> Mapping[State, int]:
    """Return the contexts that reach each state, as a bit mask of their numbers: what `reach` says of each of them,
    without paths."""
    masks: dict[State, int] = {}
    for number, context in enumerate(contexts):
        for state, _, _ in _starts(chart, context):
            masks[state] = masks.get(state, 0) | 1 << number
    following = cache(lambda state: dict.fromkeys(after for after, _, _ in _next_states(chart, state)))
    queue, waiting = deque(masks), set(masks)
    while queue:
        state = queue.popleft()
        waiting.remove(state)
        for after in following(state):
            mask = masks[state] | masks.get(after, 0)
            if masks.get(after) != mask and after not in waiting:
                waiting.add(after)
                queue.append(after)
            masks[after] = mask
    return masks


def _blocked(chart: Chart) -> Iterator[Blocked]:
    """Yield for every reader the pairs of messages in its view of which the later was encoded without the earlier."""
    own: dict[str, set[str]] = {}
    for node in chart.nodes:
        own.setdefault(node.persona, set()).update(names_of(node.name))
    read = {node.name: {source for source in node.rules if _sees(chart, node, source)} for node in chart.nodes}
    for reader in chart.nodes:
        sources = [source for source in reader.rules if source in read[reader.name] and not reader.is_function]
        for later in sources:
            if not reader.rules[later].mode.shares_kv:
                continue
            if reader.has_system:
                yield Blocked(reader=reader.name, earlier=f"{reader.persona}.system", later=later)
            if reader.schema is not None:
                yield Blocked(reader=reader.name, earlier=reader.schema, later=later)
            speakers = () if later == START_SOURCE else chart.inside(later)
            # Messages of another model are encoded again, each alone.
            views = [read[node.name] | own[node.persona] if node.speaks_to(reader) else set() for node in speakers]
            common = set(sources).intersection(*views)
            for earlier in sources:
                if earlier != later and earlier not in common:
                    yield Blocked(reader=reader.name, earlier=earlier, later=later)


def _sees(chart: Chart, node: ChartNode, source: str) -> bool:
    """Return whether a node sees anything of a source."""
    if source == START_SOURCE:
        return node.rules[source].mode.shows
    return any(node.reads(source, speaker) for speaker in chart.inside(source))


def without_answers(chart: Chart) -> Chart:
    """Return a chart in which readers get chat models' answers in functions as text wherever their KV could break a
    promise or carry a confidential message.

    Such an answer attended to anything that its function can read.
    """
    functions = {node.name for node in chart.nodes if node.is_function}
    confidential = {context.name for context in chart.contexts if context.kind == "message"}
    contexts = [context for context in chart.contexts if context.name in confidential or context in chart.guarded]
    while functions:
        findings = (finding for finding in _findings(chart, contexts) if finding.channel == "encoding")
        paths = [finding.path for finding in findings if finding.violation or finding.context in confidential]
        hops = {(hop.source, hop.reader) for path in paths for hop in path if hop.source in functions}
        shared = {(edge.source, edge.reader) for edge in chart.edges() if edge.shares_kv and not edge.is_alone}
        if not (carrying := (hops & shared) - chart.words_of):
            break
        chart = replace(chart, words_of=chart.words_of | carrying)
    return chart


def is_bound(source: str, reader: str) -> bool:
    """Return whether both are nodes of one subgraph."""
    home = reader.rpartition("|")[0]
    return bool(home) and is_inside(source, home)


def auto_reencode(chart: Chart) -> tuple[Chart, list[Hop]]:
    """Switch to `reencoded` the edges that would break a promise through the encoding channel.

    Only edges of the graph itself and those into its subgraphs are changed: edges inside a subgraph were fixed when
    that was compiled.

    Returns:
        The chart, and the edges that were changed.
    """
    changed: list[Hop] = []
    while True:
        broken = [finding for finding in violations_of(chart) if finding.channel == "encoding"]
        cuts = (edges for finding in broken if (edges := finding.cut) and not any(is_bound(*edge) for edge in edges))
        if (nearest_cut := next(cuts, None)) is None:
            return chart, changed
        for source, reader in nearest_cut:
            chart = chart.with_rule(source, reader, chart.by_name[reader].rules[source].without("encoding"))
            changed.append(Hop(source=source, reader=reader, by=REENCODED.name))


def chart_as_run(chart: Chart, on_violation: OnViolation) -> tuple[Chart, list[Hop]]:
    """Return the chart as it will run, and the edges that the policy re-encodes."""
    chart = without_answers(chart)
    return auto_reencode(chart) if on_violation == "reencode" else (chart, [])


def require_kept(chart: Chart, on_violation: OnViolation) -> None:
    """Raise or warn about violations.

    Raises:
        VisibilityError: A path would break a promise, and the policy says `raise`, or no edge but the last could be
            changed.
    """
    messages = [_describe(finding, chart) for finding in violations_of(chart)]
    if messages and on_violation != "warn":
        raise VisibilityError("; ".join(messages))
    for message in messages:
        warnings.warn(message, VisibilityWarning, stacklevel=5)


def _describe(finding: Finding, chart: Chart) -> str:
    """Describe a violation: the promise, the path, and the edge to change."""
    carrier = "an encoding that attended to it" if finding.channel == "encoding" else "text derived from it"
    start = f"{finding.violation}, but {carrier} would reach it: {finding.walk()}"
    if not finding.cut:
        return f"{start}. The edge itself violates it: remove the edge, or allow {finding.reader!r} to read it"
    edges = " and ".join(dict.fromkeys(_describe_edge(source, reader) for source, reader in finding.cut))
    leaked = [context for context in chart.contexts if context.name == finding.context]
    # A re-encoded edge still hands over the text, which does not help where the policy forbids the words as well.
    if finding.channel == "words" or any(chart.forbids(context, finding.reader, "words") for context in leaked):
        return f"{start}. Remove the visibility of {edges}"
    return f"{start}. Set the visibility of {edges} to {REENCODED!r}"


def _describe_edge(source: str, reader: str) -> str:
    """Return the pair as users declare it: a reader inside a subgraph is declared as the subgraph."""
    beside = "|".join(reader.split("|")[: source.count("|") + 1])
    return f"{source!r} to {beside!r}"
