"""`choreo bench edges`: how it is asked for and shown."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from choreo_agents.cli.graphs import current_folder, load_graph
from choreo_agents.graph import START
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, bar, errors_as_lines
from choreo_bench.experiments.bench_edges.measure import EdgeFigures, measure_edges, read_inputs, shared_edges


@takes_loading
def edges(
    target: Annotated[str, typer.Argument(help="[b]module:graph[/b]: a graph, compiled or not, or what makes one.")],
    path: Annotated[Path, typer.Argument(metavar="INPUTS", help="A JSONL file.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep every run's figures in this JSONL file, and go on from them.")
    ] = None,
    model: ModelOption = "embedded",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """What each shared edge of a graph saves, and what it changes: the same words with that edge re-encoded.

    The graph is run on each input, once as it is and once for each shared edge with that edge re-encoded. An input is a
    line: it has [b]messages[/b], and may have [b]systems[/b] (system prompts by node) and a private [b]label[/b].

    The graph is had by importing its module, whose code runs. Modules are looked for in the current folder first.

    [b]Examples[/b]

      choreo bench edges choreo_agents.workflows.graphs.debate:graph examples/data/debates.jsonl
      choreo bench edges my_package.my_graph:app inputs.jsonl --model path/or/hub-name --out runs.jsonl
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        graph, inputs = load_graph(target), read_inputs(path)
        loaded = load(console, model, loading)
        with bar(console) as progress, current_folder():
            task = progress.add_task("runs", total=len(inputs) * (1 + len(shared_edges(graph))))
            found = measure_edges(graph, inputs, model=loaded, out=out, on_progress=lambda: progress.advance(task))
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
