"""The audit of what really happened, from the lineage of the messages in a graph's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from choreo_agents.engine import Engine
from choreo_agents.graph.audit.chart import Chart
from choreo_agents.graph.audit.policy import Policy
from choreo_agents.graph.audit.report import AuditReport, Channel, Finding, Hop, PrivateContext
from choreo_agents.graph.state import HandleEntry
from choreo_agents.kv.handle import MessageHandle

_CHANNELS: tuple[Channel, ...] = ("encoding", "words")


def audit_entries(engine: Engine, chart: Chart, policy: Policy, entries: Sequence[HandleEntry]) -> AuditReport:
    """Which private contexts reached the nodes that said these messages, and through which channel."""
    contexts = {context.name: context for context in chart.contexts()}
    personas = {node.name: node.persona for node in chart.nodes}
    found: dict[tuple[str, str, Channel], Finding] = {}
    handles = [MessageHandle.model_validate(entry["handle"]) for entry in entries]
    for entry, lineage in zip(entries, engine.audit(handles).messages, strict=True):
        reader = entry["author"]
        if reader not in personas:
            continue
        for ancestor in lineage.ancestors:
            for context in reached_contexts(ancestor.authors, ancestor.confidential, contexts.values(), reader):
                for channel in _CHANNELS:
                    persona = personas[reader]
                    if channel in ancestor.channels and (context.name, persona, channel) not in found:
                        forbidden = policy.forbids(context, persona, channel)
                        found[context.name, persona, channel] = Finding(
                            context=context.name,
                            reader=persona,
                            channel=channel,
                            path=(Hop(source=context.name, reader=reader, by=f"superstep {entry['superstep']}"),),
                            violation=f"the policy keeps {context.name!r} from {persona!r}" if forbidden else "",
                        )
    return AuditReport(contexts=tuple(contexts.values()), findings=tuple(found.values()), outside=chart.outside)


def reached_contexts(
    authors: Iterable[str], confidential: bool, contexts: Iterable[PrivateContext], reader: str
) -> Iterator[PrivateContext]:
    """The private contexts that a message is, unless one of them is the reader's own: equal words are one message."""
    names = set(authors)
    meant = [c for c in contexts if c.name in names and (confidential or c.kind != "message")]
    if not any(reader in context.owners for context in meant):
        yield from meant
