"""`choreo audit`: who can be influenced by whom in a graph."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.terminal.options import JsonOption, errors_as_lines
from choreo_agents.terminal.waiting import importing

if TYPE_CHECKING:
    from choreo_agents.graph import AuditReport, ChoreoGraph
    from choreo_agents.graph.audit import Finding
    from choreo_agents.graph.visibility import Mode

_ROWS = 200
"""Findings, and lines on what is blocked, that are printed: a large graph has as many as pairs of nodes."""
_CHANNELS = {"encoding": "[red]encoding[/]", "words": "[yellow]words[/]"}


def audit(
    target: Annotated[str, typer.Argument(help="[b]module:graph[/b]: a graph, compiled or not, or what makes one.")],
    rules: Annotated[
        list[str] | None, typer.Option("--set", metavar="SOURCE:READER=MODE", help="Try another rule for an edge.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="CONTEXT[=READER,...]", help="Try a policy: who alone may have a context."),
    ] = None,
    as_json: JsonOption = False,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the graph with the paths drawn in, for a Mermaid renderer.")
    ] = False,
) -> None:
    """Who can be influenced by which private context, and how: proved from the graph alone.

    A private context is what a speaker alone is told, or messages marked confidential. [red]encoding[/]: the reader
    attends to KV that attended to it. [yellow]words[/]: only words decoded from it get there. For each the shortest
    path is shown, and the edges whose change would cut it. The exit code is 1 if a promise is broken.

    The graph is had by importing its module, whose code runs: audit none that you would not run. Modules are looked for
    in the current folder first, and only while that one is imported.

    [b]Examples[/b]

      choreo audit choreo_agents.workflows.graphs.prisoners_dilemma:graph
      choreo audit choreo_agents.workflows.graphs.prisoners_dilemma:graph --set alice:bob=reencoded
      choreo audit choreo_agents.workflows.graphs.prisoners_dilemma:graph --keep alice.plan=alice
      choreo audit my_package.my_graph:app --mermaid > graph.mmd
    """
    console = Console(stderr=as_json or mermaid, highlight=False)
    with importing(console):
        from choreo_agents.cli.graphs import load_graph
        from choreo_agents.graph.drawing import draw_audit

    with errors_as_lines(console):
        graph = _changed(load_graph(target), rules or [], keep or [])
        report = graph.audit()
        if as_json:
            typer.echo(report.model_dump_json(indent=2))
        elif mermaid:
            typer.echo(draw_audit(graph, report))
        else:
            _print(console, target, report)
    raise typer.Exit(1 if report.violations else 0)


def _changed(graph: ChoreoGraph, rules: list[str], keep: list[str]) -> ChoreoGraph:
    """The graph with rules and a policy to try."""
    from choreo_agents.graph import Policy

    for spelled in rules:
        pair, _, mode = spelled.partition("=")
        source, colon, reader = pair.partition(":")
        if not colon or not mode:
            raise ValueError(f"spell a rule as SOURCE:READER=MODE, not {spelled!r}")
        graph = graph.with_rule(source, reader, cast("Mode", mode))  # what is no mode is refused there
    if keep:
        kept = {name: frozenset(filter(None, who.split(","))) for name, _, who in (k.partition("=") for k in keep)}
        confidential = {**graph.policy.confidential, **kept}
        graph = graph.with_policy(Policy(confidential=confidential, channels=graph.policy.channels))
    return graph


def _print(console: Console, target: str, report: AuditReport) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"what can reach whom in {target}", title_justify="left")
    for column in ("private context", "reader", "channel", "shortest path", "cut by"):
        table.add_column(column, overflow="fold")
    listed = iter(report.listed)
    for finding in islice(listed, _ROWS):
        broken = "[red bold]✗ [/]" if finding.violation else ""
        channel = _CHANNELS[finding.channel]
        table.add_row(broken + escape(finding.context), finding.reader, channel, escape(finding.walk()), _cut(finding))
    if report.findings:
        console.print(table)
        if more := sum(1 for _ in listed):
            console.print(f"[dim]and {more:,} more: --json for all of them[/]")
    else:
        console.print(f"No private context of [b]{target}[/b] reaches anybody but its owner.")
    _print_blocked(console, report)
    for hop in report.changed:
        console.print(f"[green]re-encoded by the policy:[/] {hop.source} -> {hop.reader}")
    if report.outside:
        console.print(f"[dim]Outside the proof: {escape('; '.join(report.outside))}.[/]")
    for finding in report.violations:
        console.print(f"[red bold]broken:[/] {escape(finding.violation)} ({finding.channel})")


def _print_blocked(console: Console, report: AuditReport) -> None:
    from choreo_agents.graph import START

    readers: dict[tuple[str, str], list[str]] = {}
    for pair in report.blocked:
        readers.setdefault((pair.reader, pair.earlier), []).append("input" if pair.later == START else pair.later)
    for (reader, earlier), later in islice(readers.items(), _ROWS):
        seen = "input" if earlier == START else escape(earlier)
        console.print(f"[dim]blocked: {reader} reads {escape(', '.join(later))} as encoded without {seen}[/]")
    if len(readers) > _ROWS:
        console.print(f"[dim]and {len(readers) - _ROWS:,} more that are blocked: --json for all of them[/]")


def _cut(finding: Finding) -> str:
    from choreo_agents.graph import Rule

    if not finding.cut:
        return "[dim]no other rule[/]"
    how = Rule().without(finding.channel).words()
    return "\n".join(f"{source} -> {reader}: {how}" for source, reader in finding.cut)
