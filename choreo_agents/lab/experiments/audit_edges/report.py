"""What each shared edge of a graph saves and changes, on the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from choreo_agents.graph import START, ChoreoGraph
from choreo_agents.lab.experiments.audit_edges.measure import EdgeFigures, measure_edges, read_inputs, shared_edges
from choreo_agents.models import LoadedModel


def show_edges(
    console: Console, graph: ChoreoGraph, path: Path, out: Path | None, model: LoadedModel, *, as_json: bool
) -> None:
    """Measure all shared edges of a graph on a file of inputs, and show what was found.

    Args:
        console: Shows it, and how far it is.
        graph: Is run as it is, and with each edge re-encoded.
        path: The inputs.
        out: Keeps every run's figures; None: nobody does.
        model: Speaks for all nodes.
        as_json: Print one object to stdout instead.
    """
    inputs = read_inputs(path)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("runs", total=len(inputs) * (1 + len(shared_edges(graph))))
        found = measure_edges(graph, inputs, model=model, out=out, on_progress=lambda: progress.advance(bar))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
        return
    title = (
        f"what each shared edge saves and changes, on {len(inputs)} inputs: the same words with that edge re-encoded"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    probed = any(each.probe_shared is not None for each in found)
    names = ["edge", "advice", "tokens saved", "first token", "KL, nats a token", "same choice", "probe"]
    for column in names if probed else names[:-1]:
        named = column in ("edge", "advice")
        width = 11 if column.startswith("KL") else None
        table.add_column(column, justify="left" if named else "right", no_wrap=named, min_width=width)
    for each in found:
        table.add_row(*_edge_cells(each)[: len(table.columns)])
    console.print(table)
    console.print("[dim]Below each: 95 % intervals over inputs.[/]")
    if probed:
        console.print("[dim]Probe: how often a linear map reads the label, shared and re-encoded.[/]")


def _edge_cells(each: EdgeFigures) -> tuple[str, ...]:
    source = "input" if each.source == START else each.source
    probe = "" if each.probe_shared is None else f"{each.probe_shared:.2f}, {each.probe_reencoded:.2f}"
    return (
        f"{source} -> {each.reader}",
        each.advice,
        f"{each.tokens_saved:.0f} ({each.share_saved:.0%})",
        f"{1000 * each.ttft_saved_s:+.1f} ms",
        f"{each.kl:.3f}\n[dim]{each.kl_interval[0]:.3f}–{each.kl_interval[1]:.3f}[/]",
        f"{each.agreement:.0%}\n[dim]{each.agreement_interval[0]:.0%}–{each.agreement_interval[1]:.0%}[/]",
        probe,
    )
