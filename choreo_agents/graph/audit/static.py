"""The audit of a graph before it runs, and what becomes of paths that would break a promise."""

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
    """Every private context, every reader it can reach, by the shortest path, and what would cut it."""
    return AuditReport(
        contexts=chart.contexts,
        findings=StaticFindings(chart),
        blocked=Listing(lambda: _blocked(chart)),
        outside=chart.outside,
        changed=tuple(changed),
    )


class StaticFindings(Findings):
    """What is found of a graph alone: sets of contexts first, by persona and channel."""

    def __init__(self, chart: Chart) -> None:
        super().__init__(self._found)
        self._chart = chart
        pairs = [*chart.private_pairs()]
        self._sources = {
            source: PrivateContext(
                name=source, kind="message", owners=tuple(node.name for node in chart.inside(source))
            )
            for source, _ in pairs
        }
        joint = JointReach(chart, [*chart.contexts, *self._sources.values()])
        self._masks = _masks(chart, joint)
        places = {source: len(chart.contexts) + place for place, source in enumerate(self._sources)}
        self._pairs = [
            (source, reader) for source, reader in pairs if joint.at(reader, "encoding") >> places[source] & 1
        ]
        """Sources that are declared private to a reader, and reach it through others' encodings all the same."""
        self._reached: tuple[PrivateContext, Reach] | None = None

    def _found(self, only: Container[str] | None = None) -> Iterator[Finding]:
        """All, or those of the contexts of these names and of what is declared private."""
        for number, context in enumerate(self._chart.contexts):
            for (persona, channel), mask in self._masks.items() if only is None or context.name in only else ():
                if mask >> number & 1:
                    yield self._finding(context, persona, channel, self._chart.broken(context, persona, channel))
        for source, node in self._pairs:
            persona, broken = self._chart.node(node).persona, f"{source!r} is declared private to {node!r}"
            yield self._finding(self._sources[source], persona, "encoding", broken, node)

    @cached_property
    def _length(self) -> int:
        return sum(mask.bit_count() for mask in self._masks.values()) + len(self._pairs)

    def broken(self) -> Iterator[Finding]:
        return (each for each in self._found({context.name for context in self._chart.guarded}) if each.violation)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        found = {self._chart.contexts[number].name for number in bits(self._masks.get((reader, channel), 0))}
        if channel == "encoding":
            found |= {source for source, node in self._pairs if self._chart.node(node).persona == reader}
        return found

    def _finding(
        self, context: PrivateContext, persona: str, channel: Channel, broken: str, node: str | None = None
    ) -> Finding:
        """That a context gets to a persona, or to one node of it; how is worked out when somebody asks."""

        def path() -> tuple[Hop, ...]:
            whole = self._reach(context)
            there = node or nearest(self._chart, whole, persona, channel)
            assert there is not None, "it gets there"
            return whole.path(there, channel)

        def edges() -> tuple[tuple[str, str], ...]:
            return cut(self._chart, self._reach(context), persona, channel)

        said = {"context": context.name, "reader": node or persona, "channel": channel, "violation": broken}
        return Finding(**said, path=path, cut=edges)

    def _reach(self, context: PrivateContext) -> Reach:
        """Where a context gets to; that of the last that was asked for is kept."""
        if self._reached is None or self._reached[0] is not context:
            self._reached = context, reach(self._chart, context)
        return self._reached[1]


def _blocked(chart: Chart) -> Iterator[Blocked]:
    """For every reader, pairs of what it sees of which the later was encoded without the earlier."""
    numbers = _numbers(chart)
    read = {node.name: _read(chart, node, numbers) for node in chart.nodes}
    own: dict[str, int] = {}
    for node in chart.nodes:
        own[node.persona] = own.get(node.persona, 0) | sum(1 << numbers[name] for name in names_of(node.name))
    for reader in chart.nodes:
        if reader.is_function:
            continue
        seen = [source for source in reader.rules if read[reader.name] >> numbers[source] & 1]
        for later in seen:
            mode = reader.rules[later].mode
            if not mode.shares_kv:
                continue
            if reader.has_system:
                yield Blocked(reader=reader.name, earlier=f"{reader.persona}.system", later=later)
            if reader.schema is not None:
                yield Blocked(reader=reader.name, earlier=reader.schema, later=later)
            blind = 0
            for node in chart.inside(later) if later != START_SOURCE else ():
                # What another model has said is encoded alone.
                blind |= ~(read[node.name] | own[node.persona]) if node.speaks_to(reader) else -1
            if blind & read[reader.name] & ~(1 << numbers[later]):
                for earlier in seen:
                    if earlier != later and blind >> numbers[earlier] & 1:
                        yield Blocked(reader=reader.name, earlier=earlier, later=later)


def _numbers(chart: Chart) -> Mapping[str, int]:
    """Of all names under which anything is read or said."""
    names = (name for node in chart.nodes for name in (*node.rules, *names_of(node.name)))
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def _read(chart: Chart, node: ChartNode, numbers: Mapping[str, int]) -> int:
    """The sources of which a node sees anything, as bits."""
    found = 0
    for source, rule in node.rules.items():
        if (source == START_SOURCE and rule.mode.shows) or any(
            node.reads(source, each) for each in chart.inside(source)
        ):
            found |= 1 << numbers[source]
    return found


def _masks(chart: Chart, joint: JointReach) -> Mapping[tuple[str, Channel], int]:
    """By persona that speaks, and channel, the contexts of others that get there."""
    own: dict[str, int] = {}
    for number, context in enumerate(chart.contexts):
        for persona in {chart.node(owner).persona for owner in context.owners}:
            own[persona] = own.get(persona, 0) | 1 << number
    every = (1 << len(chart.contexts)) - 1
    found: dict[tuple[str, Channel], int] = {}
    for persona in dict.fromkeys(node.persona for node in chart.nodes if not node.is_function):
        for channel in CHANNELS:
            mask = 0
            for node in chart.of_persona(persona):
                mask |= joint.at(node.name, channel)
            found[persona, channel] = mask & every & ~own.get(persona, 0)
    return found


def without_answers(chart: Chart) -> Chart:
    """Have words alone read of what chat models answer in functions, wherever their encodings could break a promise, or
    carry a confidential message.

    What they attended to is anything that their function can read.
    """
    functions = {node.name for node in chart.nodes if node.is_function}
    kept = {context.name for context in chart.contexts if context.kind == "message"}
    while functions:
        found = (finding for finding in audit_chart(chart).findings if finding.channel == "encoding")
        paths = [finding.path for finding in found if finding.violation or finding.context in kept]
        hops = {(hop.source, hop.reader) for path in paths for hop in path if hop.source in functions}
        handed = {(edge.source, edge.reader) for edge in chart.edges() if edge.shares_kv and not edge.is_alone}
        if not (carrying := (hops & handed) - chart.words_of):
            break
        chart = replace(chart, words_of=chart.words_of | carrying)
    return chart


def is_bound(source: str, reader: str) -> bool:
    """Tell whether both are nodes of one subgraph."""
    home = reader.rpartition("|")[0]
    return bool(home) and is_inside(source, home)


def auto_reencode(chart: Chart) -> tuple[Chart, list[Hop]]:
    """Switch to `reencoded` what would break a promise through the encoding channel.

    Only edges of the graph itself, and what they give to agents of its subgraphs: the edges in these were bound when
    those were compiled.

    Returns:
        The chart, and the edges that were changed.
    """
    changed: list[Hop] = []
    while True:
        broken = [finding for finding in audit_chart(chart).violations if finding.channel == "encoding"]
        cuts = (found for each in broken if (found := each.cut) and not any(is_bound(*edge) for edge in found))
        nearest_cut = next(cuts, None)
        if nearest_cut is None:
            return chart, changed
        for source, reader in nearest_cut:
            chart = chart.with_rule(source, reader, chart.node(reader).rules[source].without("encoding"))
            changed.append(Hop(source=source, reader=reader, by=REENCODED.name))


def audit_as_run(chart: Chart, on_violation: OnViolation) -> tuple[Chart, AuditReport]:
    """The chart as it may run, and its audit, with the edges that the policy has changed for that."""
    chart, changed = without_answers(chart), list[Hop]()
    if on_violation == "reencode":
        chart, changed = auto_reencode(chart)
    return chart, audit_chart(chart, changed)


def chart_as_run(chart: Chart, on_violation: OnViolation) -> tuple[Chart, AuditReport]:
    """See `audit_as_run`.

    Raises:
        VisibilityError: A path would break a promise, and the policy says `raise`, or nothing but the edge itself
            could be changed.
    """
    chart, report = audit_as_run(chart, on_violation)
    told = [_said(finding, chart) for finding in report.violations]
    if told and on_violation != "warn":
        raise VisibilityError("; ".join(told))
    for each in told:
        warnings.warn(each, VisibilityWarning, stacklevel=4)
    return chart, report


def _said(finding: Finding, chart: Chart) -> str:
    """A violation in words: the private source, the path and the edge to change."""
    what = "an encoding that attended to it" if finding.channel == "encoding" else "words made of it"
    start = f"{finding.violation}, but {what} would get there: {finding.walk()}"
    if not finding.cut:
        return f"{start}. The edge itself contradicts it: remove the edge, or let {finding.reader!r} have it"
    edges = " and ".join(dict.fromkeys(_declared(source, reader) for source, reader in finding.cut))
    if finding.channel == "words" or _keeps_words(finding, chart):
        return f"{start}. Undeclare {edges}"
    return f"{start}. Declare {edges} {REENCODED!r}"


def _declared(source: str, reader: str) -> str:
    """Where a pair is declared: what an agent of a graph sees of a source beside that, over an edge to the graph."""
    beside = "|".join(reader.split("|")[: source.count("|") + 1])
    return f"{source!r} to {beside!r}"


def _keeps_words(finding: Finding, chart: Chart) -> bool:
    """Whether re-encoding would not do: the words must not get there either."""
    return any(
        context.name == finding.context and chart.forbids(context, finding.reader, "words")
        for context in chart.contexts
    )
