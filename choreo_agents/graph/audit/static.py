"""Audits a graph before it runs, and re-encodes edges or raises where a path would break a promise."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from choreo_agents.errors import VisibilityError, VisibilityWarning
from choreo_agents.graph.audit.chart import Chart, ChartNode, is_inside, names_of
from choreo_agents.graph.audit.closure import bits
from choreo_agents.graph.audit.policy import OnViolation
from choreo_agents.graph.audit.reach import JointReach, Reach, cut, nearest, reach
from choreo_agents.graph.audit.report import AuditReport, Blocked, Finding, Findings, Hop, Listing, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel

CHANNELS: tuple[Channel, ...] = ("encoding", "words")


def audit_chart(chart: Chart, changed: Sequence[Hop] = ()) -> AuditReport:
    """Report every private context, every reader it can reach by the shortest path, and the edges that would cut it."""
    findings, blocked = StaticFindings(chart), Listing(lambda: _blocked(chart))
    return AuditReport(
        contexts=chart.contexts, findings=findings, blocked=blocked, outside=chart.outside, changed=tuple(changed)
    )


class StaticFindings(Findings):
    """The findings for a graph that has not run: bit masks of contexts per persona and channel, paths on access."""

    def __init__(self, chart: Chart) -> None:
        super().__init__(self._iter_findings)
        self._chart = chart
        pairs = [*chart.private_pairs()]
        owners = {source: tuple(node.name for node in chart.inside(source)) for source, _ in pairs}
        self._sources = {name: PrivateContext(name=name, kind="message", owners=kin) for name, kin in owners.items()}
        joint = JointReach(chart, [*chart.contexts, *self._sources.values()])
        self._masks = _reach_masks(chart, joint)
        places = {source: len(chart.contexts) + place for place, source in enumerate(self._sources)}
        self._pairs = [(s, reader) for s, reader in pairs if joint.at(reader, "encoding") >> places[s] & 1]
        """Pairs (source, reader) declared private whose source reaches the reader through encodings of other nodes all
        the same."""
        self._last_reach: tuple[PrivateContext, Reach] | None = None

    def _iter_findings(self, only: Container[str] | None = None) -> Iterator[Finding]:
        """Yield all findings, or those for the contexts of these names and for private pairs."""
        for number, context in enumerate(self._chart.contexts):
            for (persona, channel), mask in self._masks.items() if only is None or context.name in only else ():
                if mask >> number & 1:
                    yield self._make(context, persona, channel, self._chart.violation_of(context, persona, channel))
        for source, node in self._pairs:
            persona, violation = self._chart.node(node).persona, f"{source!r} is declared private to {node!r}"
            yield self._make(self._sources[source], persona, "encoding", violation, node)

    @cached_property
    def _length(self) -> int:
        return sum(mask.bit_count() for mask in self._masks.values()) + len(self._pairs)

    def violations(self) -> Iterator[Finding]:
        return (f for f in self._iter_findings({context.name for context in self._chart.guarded}) if f.violation)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        names = {self._chart.contexts[number].name for number in bits(self._masks.get((reader, channel), 0))}
        if channel == "encoding":
            names |= {source for source, node in self._pairs if self._chart.node(node).persona == reader}
        return names

    def _make(
        self, context: PrivateContext, persona: str, channel: Channel, violation: str, node: str | None = None
    ) -> Finding:
        """Return the finding that a context reaches a persona, or one node of it; path and cut are computed on
        access."""

        def path() -> tuple[Hop, ...]:
            reached = self._reach(context)
            target = node or nearest(self._chart, reached, persona, channel)
            assert target is not None, "it gets there"
            return reached.path(target, channel)

        def edges() -> tuple[tuple[str, str], ...]:
            return cut(self._chart, self._reach(context), persona, channel)

        fields = {"context": context.name, "reader": node or persona, "channel": channel, "violation": violation}
        return Finding(**fields, path=path, cut=edges)

    def _reach(self, context: PrivateContext) -> Reach:
        """Return the reach of a context; the last one is cached."""
        if self._last_reach is None or self._last_reach[0] is not context:
            self._last_reach = context, reach(self._chart, context)
        return self._last_reach[1]


def _blocked(chart: Chart) -> Iterator[Blocked]:
    """Yield for every reader the pairs of messages in its view of which the later was encoded without the earlier."""
    names = (name for node in chart.nodes for name in (*node.rules, *names_of(node.name)))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    read = {node.name: _visible_sources(chart, node, numbers) for node in chart.nodes}
    own: dict[str, int] = {}
    for node in chart.nodes:
        own[node.persona] = own.get(node.persona, 0) | sum(1 << numbers[name] for name in names_of(node.name))
    for reader in chart.nodes:
        if reader.is_function:
            continue
        sources = [source for source in reader.rules if read[reader.name] >> numbers[source] & 1]
        for later in sources:
            mode = reader.rules[later].mode
            if not mode.shares_kv:
                continue
            if reader.has_system:
                yield Blocked(reader=reader.name, earlier=f"{reader.persona}.system", later=later)
            if reader.schema is not None:
                yield Blocked(reader=reader.name, earlier=reader.schema, later=later)
            blind = 0
            for node in chart.inside(later) if later != START_SOURCE else ():
                # Messages of another model are encoded again, each alone.
                blind |= ~(read[node.name] | own[node.persona]) if node.speaks_to(reader) else -1
            if blind & read[reader.name] & ~(1 << numbers[later]):
                for earlier in sources:
                    if earlier != later and blind >> numbers[earlier] & 1:
                        yield Blocked(reader=reader.name, earlier=earlier, later=later)


def _visible_sources(chart: Chart, node: ChartNode, numbers: Mapping[str, int]) -> int:
    """Return the sources of which a node sees anything, as a bit mask."""
    mask = 0
    for source, rule in node.rules.items():
        is_read = any(node.reads(source, speaker) for speaker in chart.inside(source))
        if is_read or (source == START_SOURCE and rule.mode.shows):
            mask |= 1 << numbers[source]
    return mask


def _reach_masks(chart: Chart, joint: JointReach) -> Mapping[tuple[str, Channel], int]:
    """Return the contexts of others that reach each persona through each channel, as bit masks."""
    own: dict[str, int] = {}
    for number, context in enumerate(chart.contexts):
        for persona in {chart.node(owner).persona for owner in context.owners}:
            own[persona] = own.get(persona, 0) | 1 << number
    every = (1 << len(chart.contexts)) - 1
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
        findings = (finding for finding in audit_chart(chart).findings if finding.channel == "encoding")
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
        broken = [finding for finding in audit_chart(chart).violations if finding.channel == "encoding"]
        cuts = (edges for finding in broken if (edges := finding.cut) and not any(is_bound(*edge) for edge in edges))
        if (nearest_cut := next(cuts, None)) is None:
            return chart, changed
        for source, reader in nearest_cut:
            chart = chart.with_rule(source, reader, chart.node(reader).rules[source].without("encoding"))
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
        warnings.warn(message, VisibilityWarning, stacklevel=4)
    return chart, report


def _describe(finding: Finding, chart: Chart) -> str:
    """Describe a violation: the promise, the path, and the edge to change."""
    carrier = "an encoding that attended to it" if finding.channel == "encoding" else "words made of it"
    start = f"{finding.violation}, but {carrier} would get there: {finding.walk()}"
    if not finding.cut:
        return f"{start}. The edge itself contradicts it: remove the edge, or let {finding.reader!r} have it"
    edges = " and ".join(dict.fromkeys(_describe_edge(source, reader) for source, reader in finding.cut))
    leaked = [context for context in chart.contexts if context.name == finding.context]
    # A re-encoded edge still hands over the text, which does not help where the policy forbids the words as well.
    if finding.channel == "words" or any(chart.forbids(context, finding.reader, "words") for context in leaked):
        return f"{start}. Undeclare {edges}"
    return f"{start}. Declare {edges} {REENCODED!r}"


def _describe_edge(source: str, reader: str) -> str:
    """Return the pair as users declare it: a reader inside a subgraph is declared as the subgraph."""
    beside = "|".join(reader.split("|")[: source.count("|") + 1])
    return f"{source!r} to {beside!r}"
