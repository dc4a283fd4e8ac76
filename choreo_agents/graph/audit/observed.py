"""The audit of what really happened, from the lineage of the messages in a graph's state."""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.report import AuditReport, Channel, Finding, Hop, PrivateContext
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE
from choreo_agents.kv.handle import MessageHandle

_CHANNELS: tuple[Channel, ...] = ("encoding", "words")


def audit_entries(engine: Engine, chart: Chart, entries: Sequence[HandleEntry]) -> AuditReport:
    """Which private contexts reached the nodes that said these messages, and through which channel.

    Equal words in an equal place are one message: one that somebody else has said, too, is nobody's secret.
    """
    contexts = {context.name: context for context in chart.contexts()}
    known = {START_SOURCE, *(node.name for node in chart.nodes), *contexts}
    personas = {node.name: node.persona for node in chart.nodes}
    found: dict[tuple[str, str, Channel], Finding] = {}
    handles = [MessageHandle.model_validate(entry["handle"]) for entry in entries]
    for entry, lineage in zip(entries, engine.audit(handles).messages, strict=True):
        reader = entry["author"]
        if reader not in personas:
            continue
        for ancestor in lineage.ancestors:
            context = _secret(set(ancestor.authors) & known, contexts)
            if context is None or reader in context.owners:
                continue
            for channel in _CHANNELS:
                key = (context.name, personas[reader], channel)
                if channel in ancestor.channels and key not in found:
                    forbidden = chart.forbids(context, personas[reader], channel)
                    found[key] = Finding(
                        context=context.name,
                        reader=personas[reader],
                        channel=channel,
                        path=(Hop(source=context.name, reader=reader, by=f"superstep {entry['superstep']}"),),
                        violation=f"the policy keeps {context.name!r} from {personas[reader]!r}" if forbidden else "",
                    )
    return AuditReport(contexts=tuple(contexts.values()), findings=tuple(found.values()), outside=chart.outside)


def _secret(names: set[str], contexts: dict[str, PrivateContext]) -> PrivateContext | None:
    """The private context that a message is, if it is one alone."""
    return contexts.get(next(iter(names))) if len(names) == 1 else None
