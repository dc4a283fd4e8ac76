"""Audits a graph before it runs, and re-encodes edges or raises where a path would break a promise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.chart import Chart, ChartNode, is_inside, names_of
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.audit.reach import JointReach, Reach, cut, nearest, reach
from choreo_agents.graph.audit.report import AuditReport, Blocked, Finding, Hop, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel

CHANNELS: tuple[Channel, ...] = ("encoding", "words")


def audit_chart(chart: Chart, changed: Sequence[Hop] = ()) -> AuditReport:
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
    owners = {source: tuple(node.name for node in chart.inside(source)) for source, _ in pairs}
    sources = {name: PrivateContext(name, "message", kin) for name, kin in owners.items()}
    joint = JointReach(chart, [*contexts, *sources.values()])
    reach_of = lru_cache(maxsize=1)(lambda context: reach(chart, context))
    masks = _reach_masks(chart, contexts, joint)
    for number, context in enumerate(contexts):
        for (persona, channel), mask in masks.items():
            if mask >> number & 1:
                violation = chart.violation_of(context, persona, channel)
                yield _finding(chart, reach_of, context, persona, channel, violation)
    places = {source: len(contexts) + place for place, source in enumerate(sources)}
    for source, node in pairs:
        if joint.at(node, "encoding") >> places[source] & 1:
            violation = f"{source!r} is declared private to {node!r}"
            persona = chart.by_name[node].persona
            yield _finding(chart, reach_of, sources[source], persona, "encoding", violation, node)


def _finding(
    chart: Chart,
    reach_of: Callable[[PrivateContext], Reach],
    context: PrivateContext,
    persona: str,
    channel: Channel,
    violation: str,
    node: str | None = None,
) -> Finding:
    """Return the finding that a context reaches a persona, or one node of it."""

    def path() -> tuple[Hop, ...]:
        target = node or nearest(chart, reach_of(context), persona, channel)
        assert target is not None, "it gets there"
        return reach_of(context).path(target, channel)

    def edges() -> tuple[tuple[str, str], ...]:
        return cut(chart, reach_of(context), persona, channel)

    return Finding(context.name, node or persona, channel, violation, persona, path, edges)


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


def _reach_masks(
    chart: Chart, contexts: Sequence[PrivateContext], joint: JointReach
) -> Mapping[tuple[str, Channel], int]:
    """Return the contexts of others that reach each persona through each channel, as bit masks."""
    own: dict[str, int] = {}
    for number, context in enumerate(contexts):
        for persona in {chart.by_name[owner].persona for owner in context.owners}:
            own[persona] = own.get(persona, 0) | 1 << number
    every = (1 << len(contexts)) - 1
    masks: dict[tuple[str, Channel], int] = {}
    for persona in dict.fromkeys(node.persona for node in chart.nodes if not node.is_function):
        for channel in CHANNELS:
            mask = 0
            for node in chart.of_persona(persona):
                mask |= joint.at(node.name, channel)
            masks[persona, channel] = mask & every & ~own.get(persona, 0)
    return masks


def without_answers(chart: Chart) -> Chart:
    """Return a chart in which readers get chat models' answers in functions as text wherever their KV could break a
    promise or carry a confidential message.

    Such an answer attended to anything that its function can read.
    """
    functions = {node.name for node in chart.nodes if node.is_function}
    confidential = {context.name for context in chart.contexts if context.kind == "message"}
    while functions:
        findings = (finding for finding in _findings(chart, chart.contexts) if finding.channel == "encoding")
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


def audit_as_run(chart: Chart, on_violation: OnViolation) -> tuple[Chart, AuditReport]:
    """Return the chart as it will run and its audit, with the edges that the policy re-encodes."""
    chart, changed = without_answers(chart), list[Hop]()
    if on_violation == "reencode":
        chart, changed = auto_reencode(chart)
    return chart, audit_chart(chart, changed)


def chart_as_run(chart: Chart, on_violation: OnViolation) -> tuple[Chart, AuditReport]:
    """Return what `audit_as_run` does, and raise or warn about violations.

    Raises:
        VisibilityError: A path would break a promise, and the policy says `raise`, or no edge but the last could be
            changed.
    """
    chart, report = audit_as_run(chart, on_violation)
    messages = [_describe(finding, chart) for finding in report.violations]
    if messages and on_violation != "warn":
        raise VisibilityError("; ".join(messages))
    for message in messages:
        warnings.warn(message, VisibilityWarning, stacklevel=5)
    return chart, report


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
