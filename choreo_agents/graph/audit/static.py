"""The audit of a graph before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from choreo_agents.graph.audit.chart import Chart, ChartNode
from choreo_agents.graph.audit.reach import cut, nearest, reach
from choreo_agents.graph.audit.report import AuditReport, Blocked, Finding, Hop, PrivateContext
from choreo_agents.graph.visibility import REENCODED, START_SOURCE, Channel

CHANNELS: tuple[Channel, ...] = ("encoding", "words")


def audit_chart(chart: Chart, changed: Sequence[Hop] = ()) -> AuditReport:
    """Every private context, every reader it can reach, by the shortest path, and what would cut it."""
    contexts = chart.contexts()
    findings = [finding for context in contexts for finding in _findings(chart, context)]
    findings += _broken_pairs(chart)
    return AuditReport(
        contexts=contexts,
        findings=tuple(findings),
        blocked=tuple(_blocked(chart)),
        outside=chart.outside,
        changed=tuple(changed),
    )


def _findings(chart: Chart, context: PrivateContext) -> Iterator[Finding]:
    found = reach(chart, context)
    speakers = dict.fromkeys(n.persona for n in chart.nodes if not n.is_function and n.name not in context.owners)
    for persona in speakers:
        for channel in CHANNELS:
            node = nearest(chart, found, persona, channel)
            if node is None:
                continue
            forbidden = chart.forbids(context, persona, channel)
            yield Finding(
                context=context.name,
                reader=persona,
                channel=channel,
                path=found.path(node, channel),
                cut=cut(chart, context, persona, channel),
                violation=f"the policy keeps {context.name!r} from {persona!r}" if forbidden else "",
            )


def _broken_pairs(chart: Chart) -> Iterator[Finding]:
    """Sources that are declared private to a reader, and reach it through others' encodings all the same."""
    for source, reader in chart.private_pairs():
        said = tuple(node.name for node in chart.inside(source))
        context = PrivateContext(name=source, kind="message", owners=said)
        found = reach(chart, context)
        if found.has(reader, "encoding"):
            yield Finding(
                context=source,
                reader=reader,
                channel="encoding",
                path=found.path(reader, "encoding"),
                cut=cut(chart, context, chart.node(reader).persona, "encoding"),
                violation=f"{source!r} is declared private to {reader!r}",
            )


def _blocked(chart: Chart) -> Iterator[Blocked]:
    """For every reader, pairs of what it sees of which the later was encoded without the earlier."""
    for reader in chart.nodes:
        if reader.is_function:
            continue
        seen = [
            source
            for source, rule in reader.rules.items()
            if (source == START_SOURCE and rule.mode.shows)
            or any(reader.reads(source, node) for node in chart.inside(source))
        ]
        for later in seen:
            if not reader.rules[later].mode.hands_on_encodings:
                continue
            if reader.has_system:
                yield Blocked(reader=reader.name, earlier=f"{reader.persona}.system", later=later)
            if reader.schema is not None:
                yield Blocked(reader=reader.name, earlier=reader.schema, later=later)
            if later == START_SOURCE:
                continue
            for earlier in seen:
                # What another model has said is encoded alone.
                blind = any(_blind(chart, n, earlier) or not n.speaks_to(reader) for n in chart.inside(later))
                if earlier != later and blind:
                    yield Blocked(reader=reader.name, earlier=earlier, later=later)


def _blind(chart: Chart, node: ChartNode, source: str) -> bool:
    """Whether a node sees nothing of a source."""
    own = any(other.persona == node.persona for other in chart.inside(source))
    if source == START_SOURCE:
        return not (source in node.rules and node.rules[source].mode.shows)
    return not own and not any(node.reads(source, other) for other in chart.inside(source))


def harmless(chart: Chart) -> tuple[Chart, list[Hop]]:
    """Switch to `reencoded` what would break a promise through the encoding channel.

    Only edges of the graph itself: those of its subgraphs were bound when these were compiled.

    Returns:
        The chart, and the edges that were changed.
    """
    changed: list[Hop] = []
    while True:
        broken = [finding for finding in audit_chart(chart).violations if finding.channel == "encoding"]
        cuts = [f.cut for f in broken if f.cut and not any("|" in reader for _, reader in f.cut)]
        if not cuts:
            return chart, changed
        for source, reader in cuts[0]:
            chart = chart.with_rule(source, reader, chart.node(reader).rules[source].without("encoding"))
            changed.append(Hop(source=source, reader=reader, by=REENCODED.name))
