"""`choreo bench synthesis`: how it is asked for and shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.models.random_llama import SHAPES
from choreo_agents.terminal.loading import IN_BF16, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, numbers, require_writable
from choreo_agents.training.journal import Journal
from choreo_bench.experiments.bench_synthesis.measure import (
    DEAR_TOKENS,
    REPEATS,
    WAYS,
    Sizes,
    SynthesisBench,
    key_of,
)
from choreo_bench.experiments.bench_synthesis.report import COLUMNS, SynthesisReport, as_markdown, save_plot
from choreo_bench.showing.plots import require_plots
from choreo_bench.timing.model import timed_model

LENGTHS, QUICK = "512,1024,2048,4096", "32,64"
"""Tokens of a branch, unless told otherwise."""


@takes_loading
def synthesis(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "smollm2-135m",
    branches: Annotated[int, typer.Option(min=1, help="How many are merged.")] = 4,
    lengths: Annotated[
        str | None,
        typer.Option(help=f"Tokens of each branch; several with commas.  [default: {LENGTHS}]", show_default=False),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"One run each, lengths {QUICK} unless you give others: to see that it runs."),
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every cell to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = IN_BF16,
) -> None:
    """The first token about branches: merged from their caches, and from their words put one after the other.

    Branches are random tokens that workers have encoded before, each after a shared trunk and a context of its own.
    From caches only the question is encoded; a cache mapper, of random weights here, makes copies of the branches,
    [b]now[/b] as part of the time or [b]before[/b]. Text is one prompt: of the engine's own baseline, whose prefix
    cache holds the trunk, and of Hugging Face's generate.

    [b]Examples[/b]

      choreo bench synthesis --quick --model six-layers
      choreo bench synthesis --out runs.jsonl --report synthesis.md --plot synthesis.png
      choreo bench synthesis --model llama-8b --device cuda --branches 8 --lengths 4096 --out cuda.jsonl
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if plot is not None:
            require_plots()
        require_writable(report)
        require_writable(plot)
        asked = (QUICK if quick else LENGTHS) if lengths is None else lengths
        sizes = [Sizes(branches, length) for length in numbers(asked)]
        torch.set_num_threads(threads)
        with _bench(console, model, loading, sizes, repeats=1 if quick else REPEATS) as bench:
            settings = {
                "model": model,
                "weights": bench.model.adapter.fingerprint if model not in SHAPES else "random",
                "dtype": dtype_name(bench.model.adapter.geometry.dtype),
                "threads": threads,
                "device": device_name(bench.model.adapter.device),
                "repeats": bench.repeats,
                "torch": torch.__version__,
                "transformers": version("transformers"),
            }
            with Journal(out, settings) as journal, bar(console) as progress:
                task = progress.add_task("", total=len(sizes) * len(WAYS))

                def advance(name: str, way: str) -> None:
                    progress.update(task, advance=1, description=f"{name}, {way}")

                for each in sizes:
                    name = f"{each.branches} x {each.length}"
                    bench.measure(each, journal, on_progress=partial(advance, name))
            # A journal may hold more than was asked for.
            keys = {key_of(each, way) for each in sizes for way in WAYS}
            found = SynthesisReport(settings, [record for key, record in journal.records.items() if key in keys])
        if as_json:
            typer.echo(json.dumps(found.as_object(), indent=2))
        else:
            console.print(_table(found))
            console.print(
                f"[dim]Medians of {found.settings['repeats']}; text of more than {DEAR_TOKENS} tokens is timed once.[/]"
            )
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, loading, sizes, quick=quick)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if plot is not None:
            save_plot(found, plot)
            console.print(f"[dim]drawn to {escape(str(plot))}[/]")


@contextmanager
def _bench(
    console: Console, name: str, loading: Loading, sizes: list[Sizes], *, repeats: int
) -> Iterator[SynthesisBench]:
    """A model by name, random weights drawn anew, with a context that is long enough."""
    longest = max(each.prompt + each.context for each in sizes)
    with timed_model(console, name, loading, longest, "shorter --lengths, or fewer --branches") as (loaded, path):
        yield SynthesisBench(loaded, path, loaded.adapter.geometry.dtype, repeats)


_LEFT_OUT = ("spread", "runs")
"""A terminal has no room for them."""


def _table(found: SynthesisReport) -> Table:
    shown = [place for place, column in enumerate(COLUMNS) if column not in _LEFT_OUT]
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place in shown:
        table.add_column(COLUMNS[place], justify="left" if place < 2 else "right", no_wrap=place == 1)
    for row in found.rows():
        table.add_row(*(row[place] for place in shown))
    return table


def _command(settings: dict[str, Any], loading: Loading, sizes: list[Sizes], *, quick: bool) -> str:
    """The command that measures the same again."""
    words = [f"choreo bench synthesis --model {shlex.quote(settings['model'])}", *loading.words()]
    words += [f"--branches {sizes[0].branches} --threads {settings['threads']}"]
    lengths = ",".join(str(each.length) for each in sizes)
    words += ["--quick"] * quick + [f"--lengths {lengths}"] * (not quick or lengths != QUICK)
    return " ".join(words)
