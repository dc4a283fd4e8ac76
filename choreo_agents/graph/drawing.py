"""Draws a graph: LangGraph's own drawing with visibilities on its edges, and a flowchart with paths of private
contexts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby

from langchain_core.runnables.graph import Edge, Graph
from langgraph.graph import END, START

from choreo_agents.graph.audit.chart import Chart, ChartNode
from choreo_agents.graph.audit.report import AuditReport
from choreo_agents.graph.compiling import DeclaringGraph, chart_of
from choreo_agents.graph.visibility import VisibilityRule, rule_between


class Drawing(str):
    """A Mermaid flowchart, which notebooks draw."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self}\n```"


_ARROWS = {"encoding": "==>", "words": "-.->"}


def edge_rules(graph: DeclaringGraph) -> Callable[[str, str], VisibilityRule | None]:
    """Return a function that gives the rule to draw for (source, reader); None: a function reads, or nothing is seen.

    Confidential messages are not seen by default rules.
    """
    chart, table = chart_of(graph), graph.table.declared(graph.nodes)

    def seen_by(node: ChartNode, source: str) -> VisibilityRule | None:
        nodes, rule = chart.inside(source), node.rules.get(source)
        shown = rule is None or not rule.mode.shows or not nodes or any(node.reads(source, author) for author in nodes)
        return rule if shown else None

    def rule_of(source: str, reader: str) -> VisibilityRule | None:
        inside = chart.inside(reader)
        # For a subgraph: the rule of its agents, if they all have the same.
        rules = {seen_by(node, source) for node in inside if len(inside) == 1 or not node.is_function}
        return rules.pop() if len(rules) == 1 else rule_between(table, source, reader)

    return rule_of


def label_edges(drawing: Graph, graph: DeclaringGraph) -> Graph:
    """Add to LangGraph's drawing the rules on its edges, and an edge for each declared pair without control flow."""
    drawn, rule_of = {(edge.source, edge.target) for edge in drawing.edges}, edge_rules(graph)
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
    """Return a Mermaid flowchart of nodes, edges and each context's paths to its readers.

    Thick arrows are encodings, dotted ones text; a broken promise is red.
    """
    chart, flow = chart_of(graph), [*_flow(graph)]
    taken, boxed = {node.name for node in chart.nodes}, [c.name for c in report.contexts if c.kind != "message"]
    boxes = {name: _id(name, "c" if name in taken else "n") for name in boxed}
    colours: dict[str, str] = {}  # by arrow; the first finding that draws one gives its colour
    for finding in report.listed:
        colour = "#d1495b" if finding.violation else "#edae49" if finding.channel == "words" else "#e07a1f"
        for place, hop in enumerate(finding.path):
            source = boxes.get(hop.source) if place == 0 else None
            arrow = f"{_ARROWS[finding.channel]}|{_text(finding.context)}|"
            colours.setdefault(f"    {source or _id(hop.source)} {arrow} {_id(hop.reader)}", colour)
    lines = ["flowchart TD", *_nodes(chart), *flow, *colours]
    for name in (context.name for context in report.contexts):
        lines += [f"    {boxes[name]}[[{_quoted(name)}]]:::private" if name in boxes else f"    {_id(name)}:::private"]
    lines += ["    classDef private fill:#fbe3e6,stroke:#d1495b", "    classDef function fill:#eeeeee,stroke:#999999"]
    styles = (f"    linkStyle {number} stroke:{c},color:{c}" for number, c in enumerate(colours.values(), len(flow)))
    return "\n".join([*lines, *styles])


def _nodes(chart: Chart) -> Iterator[str]:
    for name, inside in groupby(chart.nodes, lambda node: node.name.split("|")[0]):
        nodes = [*inside]
        drawn = [f"    {_id(n.name)}[{_quoted(n.name)}]{':::function' if n.is_function else ''}" for n in nodes]
        is_graph = nodes[0].name != name
        yield from [f"    subgraph {_id(name)}[{_quoted(name)}]", *drawn, "    end"] if is_graph else drawn


def _flow(graph: DeclaringGraph) -> Iterator[str]:
    """Yield the control flow, with the visibility of each edge."""
    rule_of = edge_rules(graph)
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
    """Return text as Mermaid takes it in labels."""
    return words if re.fullmatch(r"[\w .,]+", words) else _quoted(words)


def _quoted(words: str) -> str:
    return '"' + words.replace('"', "#quot;") + '"'


def _id(name: str, kind: str = "n") -> str:
    """Return a name as Mermaid takes it for a node."""
    return f"{kind}_" + re.sub(r"[^0-9A-Za-z]", lambda match: f"_{ord(match.group())}_", name)
