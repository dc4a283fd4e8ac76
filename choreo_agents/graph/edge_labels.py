"""Visibilities as the labels of edges, in LangGraph's own drawings."""

from __future__ import annotations

from collections.abc import Mapping

from langchain_core.runnables.graph import Edge, Graph

from choreo_agents.graph.visibility import Rule, rule_between


def labelled(graph: Graph, table: Mapping[str, Mapping[str, Rule]]) -> Graph:
    """A drawing with the rules of its readers on its edges, and an edge for each pair without control flow.

    Args:
        graph: Is changed.
        table: Rules by reader and source.
    """
    drawn = {(edge.source, edge.target) for edge in graph.edges}
    edges = [_label(edge, table) for edge in graph.edges]
    for reader, rules in table.items():
        for source, rule in rules.items():
            says = rule.mode.shows or rule.mode.keeps_out
            if says and (source, reader) not in drawn and {source, reader} <= graph.nodes.keys():
                edges.append(Edge(source, reader, data=rule.words(), conditional=True))
    graph.edges = edges
    return graph


def _label(edge: Edge, table: Mapping[str, Mapping[str, Rule]]) -> Edge:
    rule = rule_between(table, edge.source, edge.target)
    return edge if rule is None or edge.data else edge._replace(data=rule.words())
