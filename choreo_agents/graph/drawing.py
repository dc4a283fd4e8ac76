"""A graph's picture with the paths of private contexts drawn in, as Mermaid."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from langgraph.graph import END, START

from choreo_agents.graph.audit import AuditReport, Chart, Finding
from choreo_agents.graph.visibility import Rule, rule_between


class Drawing(str):
    """A Mermaid flowchart, which notebooks draw."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self}\n```"


_ARROWS = {"encoding": "==>", "words": "-.->"}


class Drawable(Protocol):
    """A `ChoreoGraph`, as far as it is drawn."""

    edges: set[tuple[str, str]]
    waiting_edges: set[tuple[tuple[str, ...], str]]

    @property
    def branches(self) -> Mapping[str, Mapping[str, Any]]: ...

    def chart(self) -> Chart: ...

    def visibility_table(self) -> dict[str, dict[str, Rule]]: ...


def draw_audit(graph: Drawable, report: AuditReport) -> str:
    """Nodes and edges of a graph in grey, and over them each context's way to its readers: thick for encodings, dotted
    for words, red where a promise is broken."""
    lines = ["flowchart TD", *_nodes(graph.chart()), *_flow(graph)]
    styles: list[str] = []
    count = sum("-->" in line for line in lines)
    drawn: set[tuple[str, ...]] = set()
    for finding in report.listed:
        for source, reader in _walk(finding):
            key = (finding.context, source, reader, finding.channel)
            if key in drawn:
                continue
            drawn.add(key)
            lines.append(f"    {_id(source)} {_ARROWS[finding.channel]}|{finding.context}| {_id(reader)}")
            colour = "#d1495b" if finding.violation else "#edae49" if finding.channel == "words" else "#e07a1f"
            styles.append(f"    linkStyle {count} stroke:{colour},color:{colour}")
            count += 1
    for context in report.contexts:
        lines.append(f'    {_id(context.name)}[["{context.name}"]]:::private')
    lines += ["    classDef private fill:#fbe3e6,stroke:#d1495b", "    classDef function fill:#eeeeee,stroke:#999999"]
    return "\n".join([*lines, *styles])


def _nodes(chart: Chart) -> Iterator[str]:
    for node in chart.nodes:
        yield f'    {_id(node.name)}["{node.name}"]' + (":::function" if node.is_function else "")


def _flow(graph: Drawable) -> Iterator[str]:
    """Control flow, with the visibility of each edge."""
    table = graph.visibility_table()
    pairs = set(graph.edges) | {(start, end) for starts, end in graph.waiting_edges for start in starts}
    for source, branches in graph.branches.items():
        pairs |= {(source, end) for branch in branches.values() for end in (branch.ends or {}).values()}
    for source, end in sorted(pairs):
        if source == START or end == END:
            continue
        rule = rule_between(table, source, end)
        label = "" if rule is None else f"|{rule.words()}|"
        yield f"    {_id(source)} -->{label} {_id(end)}"


def _walk(finding: Finding) -> Iterator[tuple[str, str]]:
    for hop in finding.path:
        yield hop.source, hop.reader


def _id(name: str) -> str:
    """A name as Mermaid takes it for a node."""
    return "n_" + re.sub(r"[^0-9A-Za-z]", lambda found: f"_{ord(found.group())}_", name)
