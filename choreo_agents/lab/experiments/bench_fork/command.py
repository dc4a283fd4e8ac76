"""`choreo bench fork`."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.lab.experiments.bench_fork.measure import WAYS, ForkBench
from choreo_agents.lab.experiments.bench_fork.report import COLUMNS, ForkingReport, as_markdown
from choreo_agents.lab.timing.model import timed_model
from choreo_agents.models.random_llama import SHAPES
from choreo_agents.terminal.loading import IN_BF16, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable
from choreo_agents.training.journal import Journal

_BESIDE = 600
"""Tokens that a subagent reads at most beside the reports."""

_LEFT_OUT = ("spread", "of the soonest, ms", "own prompts")
"""A terminal has no room for them."""


@takes_loading
def fork(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "smollm2-135m",
    subagents: Annotated[int, typer.Option(min=1, help="How many are forked at once.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Of what the parent is told.")] = 4096,
    messages: Annotated[int, typer.Option(min=1, help="In which these tokens come.")] = 16,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds, each of another conversation: in each every way runs once.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Of the words.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every round to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = IN_BF16,
) -> None:
    """Subagents with system prompts of their own over one conversation: forked, and with a prefix cache.

    A prefix cache finds what begins alike: under another system prompt, nothing. A fork reads what the parent has
    read, where [b]inherits[/b] allows it, and encodes its own system prompt and task. The same with the parent's
    system prompt is what a prefix cache does best. Every run has an engine of its own that knows the parent's call
    alone; all subagents come at once, and are made to give the right answer.

    [b]first token[/b] is the mean over subagents, from the moment of the fork; [b]besides[/b] is what is encoded
    without their own system prompts; [b]right[/b] is how many tokens of the right answers each way would have chosen
    itself. The loss is how far the fork's distributions are from those of the prefix cache's way, which reads all of
    it under the own system prompt. Of random weights it says little: see --model embedded.

    [b]Examples[/b]

      choreo bench fork --model embedded --dtype fp32 --tokens 800
      choreo bench fork --repeats 3 --out rounds.jsonl --report fork.md
      choreo bench fork --model llama-8b --device cuda --tokens 16384 --json
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        require_writable(report)
        torch.set_num_threads(threads)
        with timed_model(console, model, loading, tokens + _BESIDE, "fewer --tokens") as (loaded, _):
            settings = {
                "model": model,
                "weights": loaded.adapter.fingerprint if model not in SHAPES else "random",
                "dtype": dtype_name(loaded.adapter.geometry.dtype),
                "threads": threads,
                "device": device_name(loaded.adapter.device),
                "subagents": subagents,
                "tokens": tokens,
                "messages": messages,
                "seed": seed,
                "torch": torch.__version__,
                "transformers": version("transformers"),
            }
            bench = ForkBench(loaded, tokens, messages, subagents, seed)
            with Journal(out, settings) as journal, bar(console) as progress:
                task = progress.add_task("", total=repeats * len(WAYS))
                bench.measure(journal, repeats, lambda way: progress.update(task, advance=1, description=way))
            # A journal may hold more than was asked for.
            found = ForkingReport(settings, [journal.records[str(number)] for number in range(repeats)])
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, loading, repeats)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=2))
        return
    shown = [place for place, column in enumerate(COLUMNS) if column not in _LEFT_OUT]
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place in shown:
        table.add_column(COLUMNS[place], justify="right" if place else "left", no_wrap=not place)
    for row in found.rows():
        table.add_row(*(row[place] for place in shown))
    console.print(table)
    for line in found.lines():
        console.print(line)


def _command(settings: dict[str, Any], loading: Loading, repeats: int) -> str:
    """The command that measures the same again."""
    words = [f"choreo bench fork --model {shlex.quote(settings['model'])}", *loading.words()]
    words += [f"--{name} {settings[name]}" for name in ("subagents", "tokens", "messages")]
    return " ".join([*words, f"--repeats {repeats} --seed {settings['seed']} --threads {settings['threads']}"])
