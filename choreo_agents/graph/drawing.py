"""A graph's pictures: LangGraph's own with visibilities on its edges, and one with the paths of private contexts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby

from langchain_core.runnables.graph import Edge, Graph
from langgraph.graph import END, START

from choreo_agents.graph.audit.chart import Chart, ChartNode
from choreo_agents.graph.audit.report import AuditReport
from choreo_agents.graph.compiling.charting import DeclaringGraph, chart_of
from choreo_agents.graph.visibility import VisibilityRule, rule_between


class Drawing(str):
    """A Mermaid flowchart, which notebooks draw."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self}\n```"


_ARROWS = {"encoding": "==>", "words": "-.->"}


def rules_drawn(graph: DeclaringGraph) -> Callable[[str, str], VisibilityRule | None]:
    """Return how nodes see each other, by source and reader, as drawings say it; None: a function reads, or nothing is
    seen.

    What agents say confidentially is not for who reads it by a default alone.
    """
    chart, table = chart_of(graph), graph.table.declared(graph.nodes)

    def seen_by(node: ChartNode, source: str) -> VisibilityRule | None:
        said_by, rule = chart.inside(source), node.rules.get(source)
        seen = rule is None or not rule.mode.shows or not said_by or any(node.reads(source, each) for each in said_by)
        return rule if seen else None

    def rule_of(source: str, reader: str) -> VisibilityRule | None:
        inside = chart.inside(reader)
        # Of a graph, how its agents see the source, if they all do so alike.
        rules = {seen_by(node, source) for node in inside if len(inside) == 1 or not node.is_function}
        return rules.pop() if len(rules) == 1 else rule_between(table, source, reader)

    return rule_of


def labelled(drawing: Graph, graph: DeclaringGraph) -> Graph:
    """LangGraph's drawing, changed: rules on its edges, and an edge for each declared pair without control flow."""
    drawn, rule_of = {(edge.source, edge.target) for edge in drawing.edges}, rules_drawn(graph)
    drawing.edges = [
        edge if edge.data or rule is None else edge._replace(data=rule.words())
        for edge in drawing.edges
        for rule in [rule_of(edge.source, edge.target)]
    ]
    for reader, rules in graph.table.declared(graph.nodes).items():
        for source in rules:
            rule = rule_of(source, reader)
            says = rule is not None and (rule.mode.shows or rule.mode.keeps_out)
            if rule is not None and says and (source, reader) not in drawn and {source, reader} <= drawing.nodes.keys():
                drawing.edges.append(Edge(source, reader, data=rule.words(), conditional=True))
    return drawing


def draw_audit(graph: DeclaringGraph, report: AuditReport) -> str:
    """Nodes and edges of a graph in grey, and over them each context's way to its readers: thick for encodings, dotted
    for words, red where a promise is broken."""
    chart, flow = chart_of(graph), [*_flow(graph)]
    lines = ["flowchart TD", *_nodes(chart), *flow]
    styles: list[str] = []
    count = len(flow)
    taken, told = {node.name for node in chart.nodes}, [each.name for each in report.contexts if each.kind != "message"]
    boxes = {name: _id(name, "c" if name in taken else "n") for name in told}
    drawn: set[str] = set()
    for finding in report.listed:
        for place, hop in enumerate(finding.path):
            source = boxes.get(hop.source) if place == 0 else None
            arrow = f"{_ARROWS[finding.channel]}|{_text(finding.context)}|"
            line = f"    {source or _id(hop.source)} {arrow} {_id(hop.reader)}"
            if line in drawn:
                continue
            drawn.add(line)
            lines.append(line)
            colour = "#d1495b" if finding.violation else "#edae49" if finding.channel == "words" else "#e07a1f"
            styles.append(f"    linkStyle {count} stroke:{colour},color:{colour}")
            count += 1
    for name in (context.name for context in report.contexts):
        lines.append(
            f"    {boxes[name]}[[{_quoted(name)}]]:::private" if name in boxes else f"    {_id(name)}:::private"
        )
    lines += ["    classDef private fill:#fbe3e6,stroke:#d1495b", "    classDef function fill:#eeeeee,stroke:#999999"]
    return "\n".join([*lines, *styles])


def _nodes(chart: Chart) -> Iterator[str]:
    for name, inside in groupby(chart.nodes, lambda node: node.name.split("|")[0]):
        nodes = [*inside]
        drawn = [f"    {_id(n.name)}[{_quoted(n.name)}]{':::function' if n.is_function else ''}" for n in nodes]
        is_graph = nodes[0].name != name
        yield from [f"    subgraph {_id(name)}[{_quoted(name)}]", *drawn, "    end"] if is_graph else drawn


def _flow(graph: DeclaringGraph) -> Iterator[str]:
    """Control flow, with the visibility of each edge."""
    rule_of = rules_drawn(graph)
    pairs = set(graph.edges) | {(start, end) for starts, end in graph.waiting_edges for start in starts}
    for source, branches in graph.branches.items():
        pairs |= {(source, end) for branch in branches.values() for end in (branch.ends or {}).values()}
    for source, end in sorted(pairs):
        if source == START or end == END:
            continue
        rule = rule_of(source, end)
        label = "" if rule is None else f"|{_text(rule.words())}|"
        yield f"    {_id(source)} -->{label} {_id(end)}"


def _text(words: str) -> str:
    """Return words as Mermaid takes them for what it shows."""
    return words if re.fullmatch(r"[\w .,]+", words) else _quoted(words)


def _quoted(words: str) -> str:
    return '"' + words.replace('"', "#quot;") + '"'


def _id(name: str, kind: str = "n") -> str:
    """A name as Mermaid takes it for a node."""
    return f"{kind}_" + re.sub(r"[^0-9A-Za-z]", lambda found: f"_{ord(found.group())}_", name)
