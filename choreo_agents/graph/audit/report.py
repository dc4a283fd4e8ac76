"""The result of an audit as typed plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal, NamedTuple

from choreo_agents.graph.visibility import START_SOURCE, Channel
from choreo_agents.tracing import table_html

SENT = "sent"
"""Prefix in a hop: a `Send` hands on the message in this mode although the rule shares KV."""
ACROSS = "across models"
"""Suffix in a hop: the reader runs on another model than the source, whose text is encoded again for it."""
ROWS = 200
"""Most findings and blocked pairs that are displayed: a large graph has as many as it has pairs of nodes."""
ContextKind = Literal["system", "message", "module", "thoughts"]


@dataclass(frozen=True)
class Hop:
    """A step of a path: the source, the reader, and the rule by which it reads."""

    source: str
    reader: str
    by: str
    """The edge's rule; `own` between nodes of one persona; `scope` where a fresh encoding names the context; `...
    across models` where the reader runs on another model and gets text alone; `state` where a function reads the text
    in the graph's state; `sent` where a `Send` may hand on text though the rule shares KV."""


@dataclass(frozen=True)
class PrivateContext:
    """A text that should influence only some of the agents."""

    name: str
    kind: ContextKind
    owners: tuple[str, ...]
    """The nodes that have it in their own views, or wrote it."""


@dataclass(frozen=True)
class Finding:
    """A private context that can reach, or has reached, a reader. Its path and its cut are computed on first access."""

    context: str
    reader: str
    """A persona, or one node."""
    channel: Channel
    violation: str = ""
    """The promise it breaks; empty if none."""
    persona: str = field(default="", repr=False)
    """The reader's persona, if the reader is one node."""
    find_path: Callable[[], tuple[Hop, ...]] = field(default=tuple, repr=False, compare=False)
    find_cut: Callable[[], tuple[tuple[str, str], ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def path(self) -> tuple[Hop, ...]:
        """The shortest path, starting at the context."""
        return self.find_path()

    @cached_property
    def cut(self) -> tuple[tuple[str, str], ...]:
        """Edges (source, reader) that cut all paths: `reencoded` for the encoding channel, undeclared for text. Empty
        if no edges would."""
        return self.find_cut()

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.context, self.reader, self.channel, self.violation, self.persona
        return Finding, (*fields, partial(tuple, self.path), partial(tuple, self.cut))

    def walk(self) -> str:
        """Return the path as text: `alice.system -> alice =shared=> bob`."""
        steps = [f" -> {hop.reader}" if hop.by == "own" else f" ={hop.by}=> {hop.reader}" for hop in self.path]
        return "".join([self.path[0].source if self.path else self.context, *steps])


@dataclass(frozen=True)
class Blocked:
    """Two messages of one view, the later of which was encoded without attending to the earlier, unlike in ordinary
    prompting."""

    reader: str
    earlier: str
    later: str


class Row(NamedTuple):
    """Findings of one context through one channel, as a row of a table."""

    context: str
    readers: str
    channel: Channel
    walks: str
    """The paths, one per line, without those that are the beginning of another."""
    cuts: str
    """The edges that would cut the paths, by reader."""
    is_broken: bool


def _input(source: str) -> str:
    return "input" if source == START_SOURCE else source


@dataclass(frozen=True, eq=False)
class AuditReport:
    """The private contexts that can influence each agent, or, for a finished run, did.

    There may be as many findings as pairs of nodes: they, their paths and cuts are computed on first access.
    """

    contexts: tuple[PrivateContext, ...]
    """Texts that not every agent may read."""
    find: Callable[[], Iterable[Finding]] = field(repr=False)
    find_blocked: Callable[[], Iterable[Blocked]] = field(default=tuple, repr=False)
    outside: tuple[str, ...] = ()
    """What the audit cannot prove anything about."""
    changed: tuple[Hop, ...] = ()
    """Edges that the policy has switched to `reencoded`."""
    find_violations: Callable[[], Iterable[Finding]] | None = field(default=None, repr=False)
    """Finds the violations without all other findings; None: they are looked for among these."""

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Contexts that reach a reader, and then sources that are private to it and reach it all the same."""
        return tuple(self.find())

    @cached_property
    def blocked(self) -> tuple[Blocked, ...]:
        """Pairs of messages of one view, of which the later was encoded without the earlier."""
        return tuple(self.find_blocked())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AuditReport) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.contexts)

    def __reduce__(self) -> tuple[Any, ...]:
        finders = partial(tuple, self.findings), partial(tuple, self.blocked)
        return AuditReport, (self.contexts, *finders, self.outside, self.changed)

    def to_json(self, indent: int | None = None) -> str:
        """Return the whole report as JSON, with all paths and cuts."""
        names = ("context", "reader", "channel", "violation")
        findings = [
            {**{name: getattr(f, name) for name in names}, "path": [*map(asdict, f.path)], "cut": f.cut}
            for f in self.findings
        ]
        contexts, blocked, changed = ([*map(asdict, items)] for items in (self.contexts, self.blocked, self.changed))
        plain = {"contexts": contexts, "findings": findings, "blocked": blocked, "outside": self.outside}
        return json.dumps({**plain, "changed": changed}, indent=indent)

    @cached_property
    def violations(self) -> tuple[Finding, ...]:
        """The findings that break a promise, found without the others."""
        if self.find_violations is not None:
            return tuple(self.find_violations())
        return tuple(finding for finding in self.findings if finding.violation)

    @property
    def listed(self) -> Sequence[Finding]:
        """The findings, violations first. Text that reaches a reader of the encoding is left out: it adds nothing,
        unless it breaks a promise."""
        attended = {(f.reader, f.context) for f in self.findings if f.channel == "encoding"}
        kept = [finding for finding in self.findings if not finding.violation]
        encodings = [finding for finding in kept if finding.channel == "encoding"]
        words = [f for f in kept if f.channel == "words" and (f.reader, f.context) not in attended]
        return [*self.violations, *encodings, *words]

    def rows(self, most: int | None = None) -> Iterator[Row]:
        """Yield a table row for each context, channel and kind of finding, of the first `most` listed findings."""
        folded: dict[tuple[object, ...], list[Finding]] = {}
        for f in islice(self.listed, most):
            folded.setdefault((f.context, f.channel, bool(f.violation), bool(f.cut)), []).append(f)
        for findings in folded.values():
            first = findings[0]
            walks = dict.fromkeys(finding.walk() for finding in findings)
            paths = [walk for walk in walks if not any(longer.startswith(f"{walk} ") for longer in walks)]
            edges: dict[str, dict[str, None]] = {}
            for source, reader in (edge for finding in findings for edge in finding.cut):
                edges.setdefault(reader, {})[source] = None
            cuts = [f"{', '.join(sources)} -> {reader}" for reader, sources in edges.items()]
            readers = ", ".join(dict.fromkeys(finding.reader for finding in findings))
            yield Row(first.context, readers, first.channel, "\n".join(paths), "\n".join(cuts), bool(first.violation))

    def blocked_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield table rows (reader, messages, what these were encoded without)."""
        later: dict[tuple[str, str], list[str]] = {}
        for pair in self.blocked:
            later.setdefault((pair.reader, _input(pair.earlier)), []).append(_input(pair.later))
        earlier: dict[tuple[str, str], list[str]] = {}
        for (reader, unseen), messages in later.items():
            earlier.setdefault((reader, ", ".join(messages)), []).append(unseen)
        for (reader, joined), names in earlier.items():
            yield reader, joined, ", ".join(names)

    def reached(self, reader: str, channel: Channel) -> set[str]:
        """Return the contexts that reach a reader through a channel."""
        return {f.context for f in self.findings if f.channel == channel and reader in (f.reader, f.persona)}

    def _repr_html_(self) -> str:
        rows = ((*row[:4], row.cuts or None, "✗" if row.is_broken else None) for row in self.rows(ROWS))
        columns = ("private context", "can reach", "through", "path", "cut by", "breaks a promise")
        table = table_html(f"who can be influenced by what: {len(self.violations)} promises are broken", columns, rows)
        blocked = islice(self.blocked_rows(), ROWS)
        return table + table_html("encoded without", ("in the view of", "messages", "have not seen"), blocked)
