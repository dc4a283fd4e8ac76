"""The audit of what really happened, from the lineage of the messages in a graph's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.influence import Declared, InfluenceTracker
from choreo_agents.graph.audit.report import AuditReport, Finding, Hop
from choreo_agents.graph.state import HandleEntry, model_of
from choreo_agents.graph.visibility import Channel


def audit_entries(engines: Iterable[Engine], declared: Declared, entries: Sequence[HandleEntry]) -> AuditReport:
    """Which private contexts reached the nodes that said these messages, and through which channel.

    What was said by a model that none of the engines runs is outside of what they can tell.
    """
    chart = declared.chart
    contexts = {context.name: context for context in chart.contexts}
    labels = InfluenceTracker(engines, declared, entries)
    lost: Counter[str] = Counter()
    found: dict[tuple[str, str, Channel], Finding] = {}
    for entry in entries:
        reader = entry["author"]
        if reader not in declared.nodes or declared.nodes[reader].is_function:
            continue
        persona = declared.nodes[reader].persona
        reached = labels.of(entry)
        if reached is None:
            lost[model_of(entry["handle"])] += 1
        for name, channel in sorted(reached or ()):
            context, key = contexts.get(name), (name, persona, channel)
            if context is None or reader in context.owners or key in found:
                continue
            found[key] = Finding(
                context=name,
                reader=persona,
                channel=channel,
                path=(Hop(source=name, reader=reader, by=f"superstep {entry['superstep']}"),),
                violation=chart.broken(context, persona, channel),
            )
    untold = [
        f"what reached {count} messages that model {model!r} has said, which no engine here runs"
        for model, count in lost.items()
    ]
    return AuditReport(
        contexts=tuple(contexts.values()), findings=tuple(found.values()), outside=(*chart.outside, *untold)
    )
