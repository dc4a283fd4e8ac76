"""What an audit says, as typed plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from choreo_agents.graph.visibility import Channel

SENT = "sent"
"""In a hop, before the mode in which a `Send` hands on what a rule shares."""
ACROSS = "across models"
"""In a hop, behind the rule: its reader runs on another model than the source, whose words are encoded again for it."""
ContextKind = Literal["system", "message", "module", "thoughts"]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True)


class Hop(_Plain):
    """One step of a path: who reads whom, and how."""

    source: str
    reader: str
    by: str
    """The rule of the edge; `own` between nodes of one persona, `scope` where a fresh encoding names the context,
    `... across models` where the reader runs on another model, so that words alone go on, `state` where a function
    reads the words in the graph's state, `sent` where a `Send` may hand on words though the rule hands on encodings."""


class PrivateContext(_Plain):
    """A text that not everybody should be influenced by."""

    name: str
    kind: ContextKind
    owners: tuple[str, ...]
    """The nodes that have it in their own views, or say it."""


class Finding(_Plain):
    """A private context can reach, or has reached, a reader."""

    context: str
    reader: str
    """A persona: one node, or all nodes of one speaker."""
    channel: Channel
    path: tuple[Hop, ...]
    """The shortest, from the context on."""
    cut: tuple[tuple[str, str], ...] = ()
    """Edges, as (source, reader): with all of them `reencoded` nothing is left in the encoding channel; for words they
    would have to be undeclared. Empty if nothing of that kind helps."""
    violation: str = ""
    """Which promise it breaks; empty if none."""

    def walk(self) -> str:
        """The path in words: `alice.system -> alice =shared=> bob`."""
        steps = [f" -> {hop.reader}" if hop.by == "own" else f" ={hop.by}=> {hop.reader}" for hop in self.path]
        return "".join([self.path[0].source if self.path else self.context, *steps])


class Blocked(_Plain):
    """Two messages of one view, the later of which was encoded without the earlier: ordinary prompting would not."""

    reader: str
    earlier: str
    later: str


class AuditReport(_Plain):
    """Who can be influenced by whom, or, of a run, who was."""

    contexts: tuple[PrivateContext, ...]
    findings: tuple[Finding, ...]
    blocked: tuple[Blocked, ...] = ()
    outside: tuple[str, ...] = ()
    """What the proof does not cover."""
    changed: tuple[Hop, ...] = ()
    """Edges that the policy has switched to `reencoded`."""

    @property
    def violations(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.violation)

    @property
    def listed(self) -> tuple[Finding, ...]:
        """The findings without those that say nothing new: words that a `Send` could hand on to who may attend to the
        encoding, and what follows from that."""
        shared = {(finding.context, finding.reader) for finding in self.findings if finding.channel == "encoding"}
        return tuple(
            finding
            for finding in self.findings
            if finding.channel == "encoding"
            or (finding.context, finding.reader) not in shared
            or not any(hop.by.startswith(f"{SENT} ") for hop in finding.path)
        )

    def reached(self, reader: str, channel: Channel) -> set[str]:
        """The contexts that reach a reader through a channel."""
        return {f.context for f in self.findings if f.reader == reader and f.channel == channel}
