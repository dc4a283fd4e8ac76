"""Audits a finished run: which private contexts reached which agents, by the lineage of the messages in the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.influence import Declared, InfluenceTracker
from choreo_agents.graph.audit.report import AuditReport, Finding, Hop
from choreo_agents.graph.state import HandleEntry, model_of
from choreo_agents.graph.visibility import Channel


def audit_entries(engines: Iterable[Engine], declared: Declared, entries: Sequence[HandleEntry]) -> AuditReport:
    """Report which private contexts reached the authors of these messages, and through which channel.

    Messages of models that none of the engines runs cannot be traced: the report lists them as `outside`.
    """
    chart = declared.chart
    contexts = {context.name: context for context in chart.contexts}
    tracker = InfluenceTracker(engines, declared, entries)
    unserved: Counter[str] = Counter()
    findings: dict[tuple[str, str, Channel], Finding] = {}
    for entry in entries:
        reader = entry["author"]
        if reader not in declared.nodes or declared.nodes[reader].is_function:
            continue
        persona = declared.nodes[reader].persona
        reached = tracker.trace(entry)
        if reached is None:
            unserved[model_of(entry["handle"])] += 1
        for name, channel in sorted(reached or ()):
            context, key = contexts.get(name), (name, persona, channel)
            if context is None or reader in context.owners or key in findings:
                continue
            findings[key] = Finding(
                context=name,
                reader=persona,
                channel=channel,
                path=(Hop(source=name, reader=reader, by=f"superstep {entry['superstep']}"),),
                violation=chart.violation_of(context, persona, channel),
            )
    outside = [*chart.outside]
    for model, count in unserved.items():
        outside.append(f"what reached {count} messages that model {model!r} has said, which no engine here runs")
    return AuditReport(contexts=tuple(contexts.values()), findings=tuple(findings.values()), outside=tuple(outside))
