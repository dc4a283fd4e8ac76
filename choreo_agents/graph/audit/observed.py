"""The audit of what really happened, from the lineage of the messages in a graph's state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from choreo_agents.engine import Engine
from choreo_agents.engine.inspect import Ancestor
from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.report import AuditReport, Finding, Hop
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.visibility import START_SOURCE, Channel
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
    for entry, lineage in zip(entries, engine.inspect.audit(handles).messages, strict=True):
        reader = entry["author"]
        if reader not in personas:
            continue
        for ancestor in lineage.ancestors:
            names = set(names_of(ancestor, entries)) & known
            secrets = [contexts[name] for name in sorted(names)] if names <= contexts.keys() else []
            if any(reader in context.owners for context in secrets):
                continue
            for context, channel in product(secrets, _CHANNELS):
                key = (context.name, personas[reader], channel)
                if channel in ancestor.channels and key not in found:
                    forbidden = all(chart.forbids(secret, personas[reader], channel) for secret in secrets)
                    found[key] = Finding(
                        context=context.name,
                        reader=personas[reader],
                        channel=channel,
                        path=(Hop(source=context.name, reader=reader, by=f"superstep {entry['superstep']}"),),
                        violation=f"the policy keeps {context.name!r} from {personas[reader]!r}" if forbidden else "",
                    )
    return AuditReport(contexts=tuple(contexts.values()), findings=tuple(found.values()), outside=chart.outside)


def names_of(ancestor: Ancestor, entries: Sequence[HandleEntry]) -> list[str]:
    """Who said it in this run. Equal words in an equal place are one message, whoever else said them elsewhere."""
    said = [entry.get("unproven") or entry for entry in entries if entry["handle"]["id"] == ancestor.handle.id]
    return [each["author"] for each in said] or sorted(ancestor.authors)
