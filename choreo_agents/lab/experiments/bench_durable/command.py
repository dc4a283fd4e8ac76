"""`choreo bench durable`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.experiments.bench_durable.graph import DurableLengths
from choreo_agents.lab.experiments.bench_durable.measure import LASTING, DurableBench
from choreo_agents.lab.experiments.bench_durable.report import COLUMNS, DurableReport, as_markdown
from choreo_agents.lab.rivals import Absent
from choreo_agents.lab.timing.model import timed_model
from choreo_agents.models.random_llama import SHAPES
from choreo_agents.terminal.loading import IN_BF16, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable
from choreo_agents.training.journal import Journal

_TOKENS_A_WORD = 3
_TURN = 16
"""Tokens around a turn at most."""


@takes_loading
def durable(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "smollm2-135m",
    turns: Annotated[int, typer.Option(min=1, help="Questions of a user, in one thread.")] = DurableLengths.turns,
    workers: Annotated[int, typer.Option(min=1, help="Agents that answer at once.")] = DurableLengths.workers,
    task: Annotated[int, typer.Option(min=1, help="Words of each question and system prompt.")] = DurableLengths.task,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = DurableLengths.answer,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs of runs, each on other words.")] = 9,
    seed: Annotated[int, typer.Option(help="Of the words.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every pair to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = IN_BF16,
) -> None:
    """What it costs that a run can go on in another process: the same graph with lineage, and without.

    A planner, workers side by side and a writer answer a few turns, with a SQLite checkpointer in both. Runs come in
    pairs on the same words, each on a fresh engine and in fresh files; which of a pair is first takes turns. The
    engine's thread is the one that computes: what is written is written by others, and shows in the CPU of the process.

    [b]Examples[/b]

      choreo bench durable --model embedded --dtype fp32 --repeats 3
      choreo bench durable --out pairs.jsonl --report durable.md
    """
    console = Console(stderr=as_json, highlight=False)
    lengths = DurableLengths(turns, workers, task, answer)
    with errors_as_lines(console):
        require_writable(report)
        torch.set_num_threads(threads)
        longest = 2 * task * _TOKENS_A_WORD + turns * (task * _TOKENS_A_WORD + (workers + 2) * (answer + _TURN))
        with timed_model(console, model, loading, longest, "fewer --turns or a shorter --task") as (loaded, _):
            settings = {
                "model": model,
                "weights": loaded.adapter.fingerprint if model not in SHAPES else "random",
                "dtype": dtype_name(loaded.adapter.geometry.dtype),
                "threads": threads,
                "device": device_name(loaded.adapter.device),
                **asdict(lengths),
                "seed": seed,
                **{name: version(name) for name in ("torch", "transformers", "langgraph")},
            }
            bench = DurableBench(loaded, lengths, seed)
            with Journal(out, settings) as journal, bar(console) as progress:
                shown = progress.add_task("", total=repeats * len(LASTING))
                try:
                    bench.measure(journal, repeats, lambda what: progress.update(shown, advance=1, description=what))
                except Absent as reason:
                    raise InvalidRequestError(f"there is no checkpointer to measure with: {reason}") from reason
            # A journal may hold more than was asked for.
            found = DurableReport(settings, [journal.records[str(number)] for number in range(repeats)])
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, loading, repeats)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place else "left")
    for row in found.rows():
        table.add_row(*row)
    console.print(table)
    for line in found.lines():
        console.print(line)


def _command(settings: dict[str, Any], loading: Loading, repeats: int) -> str:
    """The command that measures the same again."""
    words = [f"choreo bench durable --model {shlex.quote(settings['model'])}", *loading.words()]
    words += [f"--{name} {settings[name]}" for name in asdict(DurableLengths())]
    return " ".join([*words, f"--repeats {repeats} --seed {settings['seed']} --threads {settings['threads']}"])
