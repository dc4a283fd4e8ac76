"""`choreo audit`: lists which private contexts can influence which agents of a graph, before it runs."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.terminal.options import JsonOption, command_console, titled

if TYPE_CHECKING:
    from choreo_agents.graph import AuditReport, ChoreoGraph
    from choreo_agents.graph.visibility import Mode

_CHANNELS = {"encoding": "[red]encoding[/]", "words": "[yellow]words[/]"}


def audit(
    target: Annotated[str, typer.Argument(help="[b]module:graph[/b]: a graph, compiled or not, or its factory.")],
    rules: Annotated[
        list[str] | None, typer.Option("--set", metavar="SOURCE:READER=MODE", help="Set another visibility of an edge.")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="CONTEXT[=READER,...]", help="Set a policy: who alone may have a context."),
    ] = None,
    as_json: JsonOption = False,
    mermaid: Annotated[
        bool, typer.Option("--mermaid", help="Print the graph with the paths as a Mermaid diagram.")
    ] = False,
) -> None:
    """List which agents can be influenced by which private context, and how: proved from the graph alone.

    A private context is an agent's own system prompt, or messages marked confidential. [red]encoding[/]: the reader
    attends to KV that attended to it. [yellow]words[/]: only words decoded from it get there. For each the shortest
    path is shown, and the edges whose change would cut it. The exit code is 1 if the graph's policy is violated.

    The graph's module is imported, so its code runs: audit only graphs that you would run. While it is imported, the
    current folder is searched for modules first.

    [b]Examples[/b]

      choreo audit choreo_agents.workflows.graphs.prisoners_dilemma:graph
      choreo audit choreo_agents.workflows.graphs.prisoners_dilemma:graph --set alice:bob=reencoded
      choreo audit choreo_agents.workflows.graphs.prisoners_dilemma:graph --keep alice.plan=alice
      choreo audit my_package.my_graph:app --mermaid > graph.mmd
    """
    with command_console(as_json=as_json or mermaid) as console:
        from choreo_agents.cli.graphs import load_graph
        from choreo_agents.graph.drawing import draw_audit

        graph = _with_changes(load_graph(target), rules or [], keep or [])
        report = graph.audit()
        if as_json:
            typer.echo(report.to_json(indent=2))
        elif mermaid:
            typer.echo(draw_audit(graph, report))
        else:
            _print(console, target, report)
    raise typer.Exit(1 if report.violations else 0)


def _with_changes(graph: ChoreoGraph, rules: list[str], keep: list[str]) -> ChoreoGraph:
    """Return the graph with the rules and the policy of `--set` and `--keep`."""
    for spelled in rules:
        pair, _, mode = spelled.partition("=")
        source, colon, reader = pair.partition(":")
        if not colon or not mode:
            raise ValueError(f"a rule must be SOURCE:READER=MODE, not {spelled!r}")
        graph = graph.with_rule(source, reader, cast("Mode", mode))  # `with_rule` rejects an unknown mode
    if keep:
        new = {name: frozenset(filter(None, names.split(","))) for name, _, names in (k.partition("=") for k in keep)}
        confidential = {**graph.policy.confidential, **new}
        graph = graph.with_policy(graph.policy.model_copy(update={"confidential": confidential}))
    return graph


def _print(console: Console, target: str, report: AuditReport) -> None:
    from choreo_agents.graph.audit.report import ROWS

    how, rows = {"encoding": "reencoded", "words": "private"}, []
    for row in report.rows(ROWS):
        broken = "[red bold]✗ [/]" if row.is_broken else ""
        cuts = "\n".join(f"{escape(cut)}: {how[row.channel]}" for cut in row.cuts.splitlines())
        reached = escape(row.readers), _CHANNELS[row.channel], escape(row.walks), cuts or "[dim]no other rule[/]"
        rows.append((broken + escape(row.context), *reached))
    if report.findings:
        columns = ("private context", "readers", "channel", "shortest paths", "cut by")
        console.print(titled(f"what can reach whom in {target}", columns, rows))
        if (more := len(report.listed) - ROWS) > 0:
            console.print(f"[dim]and {more:,} more: --json for all of them[/]")
    else:
        console.print(f"No private context of [b]{escape(target)}[/b] reaches any other persona.")
    blocked = report.blocked_rows()
    for reader, messages, unseen in islice(blocked, ROWS):
        console.print(f"[dim]blocked: {escape(f'{reader} reads {messages} as encoded without {unseen}')}[/]")
    if more := sum(1 for _ in blocked):
        console.print(f"[dim]and {more:,} more that are blocked: --json for all of them[/]")
    for hop in report.changed:
        console.print(f"[green]re-encoded by the policy:[/] {escape(f'{hop.source} -> {hop.reader}')}")
    if report.outside:
        console.print(f"[dim]Not covered by the audit: {escape('; '.join(report.outside))}.[/]")
    for finding in report.violations:
        console.print(f"[red bold]broken:[/] {escape(finding.violation)} ({finding.channel})")
