"""`choreo bench workflows`: how it is asked for and shown."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.engine.settings import MethodName
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.terminal.loading import IN_BF16, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, numbers, require_writable
from choreo_agents.training.journal import Journal
from choreo_bench.experiments.bench_workflows.measure import METHODS, WorkflowBench, key_of, measure_workflows
from choreo_bench.experiments.bench_workflows.plot import save_lengths, save_sweep
from choreo_bench.experiments.bench_workflows.report import COLUMNS, WorkflowReport, as_markdown
from choreo_bench.experiments.bench_workflows.scenarios import (
    Lengths,
    WorkflowScenario,
    debate_in_turns,
    parallel_debate,
    tree,
)
from choreo_bench.rivals import Absent, ChatHuggingFaceDebate
from choreo_bench.showing.plots import require_plots

PAPER = (tree(), debate_in_turns(), parallel_debate())
SWEEP_BRANCHES, SWEEP_VOTERS = (2, 4, 8, 16), (4, 8, 16)
"""Of figure 5."""


@takes_loading
def workflows(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", min=1, help="Problems.")] = 30,
    only: Annotated[list[str] | None, typer.Option("--only", help="Workflows whose name has this in it.")] = None,
    methods: Annotated[str, typer.Option(help="With commas between.")] = ",".join(METHODS),
    naive: Annotated[
        int | None, typer.Option(min=0, help="On how many of the problems naive runs; by default all.")
    ] = None,
    chat: Annotated[
        int, typer.Option(min=0, help="On how many of the problems a graph with ChatHuggingFace runs MADpar, too.")
    ] = 0,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Trees of 2 to 16 branches and 4 to 16 voters instead (figure 5).")
    ] = False,
    critics: Annotated[
        bool, typer.Option("--critics", help="In the sweep, voters have system prompts of their own.")
    ] = False,
    system: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt or instruction.")] = 64,
    problem: Annotated[int, typer.Option(min=1, help="Tokens of a problem.")] = 128,
    utterance: Annotated[str, typer.Option(help="Tokens of each utterance; several lengths with commas.")] = "256",
    kv_gib: Annotated[float, typer.Option("--kv-gib", min=0.01, help="KV memory of an engine, in GiB.")] = 4.0,
    threads: Annotated[int, typer.Option(min=1, help="Of the processor.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every run to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the sweep, or the lengths, to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = IN_BF16,
) -> None:
    """The paper's workflows, word for word the same under every method (tables 4 and 5, figures 5 and 7).

    Every call is forced to given tokens, and every decode step is paid for: methods differ in what they encode. The
    baseline has a radix prefix cache, and its calls share steps like choreo's. Runs take turns, each on a fresh engine.

    [b]Examples[/b]

      choreo bench workflows --model embedded --n 5 --utterance 32
      choreo bench workflows --out runs.jsonl --report workflows.md
      choreo bench workflows --sweep --critics --n 1 --methods choreo,baseline --plot sweep.png
      choreo bench workflows --model llama-8b --device cuda --out cuda.jsonl --report cuda.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if plot is not None:
            require_plots()
        chosen = _scenarios(only, sweep=sweep, critics=critics)
        named = _methods(methods)
        if plot is not None and not {"choreo", "baseline"} <= set(named):
            raise InvalidRequestError("--plot draws the baseline's times over choreo's: let --methods name both")
        lengths = [Lengths(system, problem, each) for each in numbers(utterance)]
        require_writable(report)
        require_writable(plot)
        torch.set_num_threads(threads)
        with _loaded(console, model, loading, chat) as (loaded, rival):
            bench = WorkflowBench(loaded, named, int(kv_gib * (1 << 30)), naive, rival, chat)
            settings = {
                "model": model,
                "weights": loaded.adapter.fingerprint if model not in SHAPES else "random",
                "dtype": dtype_name(loaded.adapter.geometry.dtype),
                "threads": threads,
                "device": device_name(loaded.adapter.device),
                "kv_gib": kv_gib,
                **_versions(),
            }
            with Journal(out, settings) as journal, bar(console) as progress:
                runs = [bench.of(scenario, problem) for scenario in chosen for problem in range(n)]
                task = progress.add_task("", total=sum(map(len, runs)) * len(lengths))
                for each in lengths:
                    measure_workflows(
                        bench,
                        chosen,
                        journal,
                        problems=n,
                        lengths=each,
                        on_progress=lambda key: progress.update(task, advance=1, description=key),
                    )
            # A journal may hold more than was asked for.
            keys = {
                key_of(scenario.name, each, number, method)
                for each in lengths
                for scenario in chosen
                for number in range(n)
                for method in bench.of(scenario, number)
            }
            found = WorkflowReport(settings, [record for key, record in journal.records.items() if key in keys])
        if as_json:
            typer.echo(json.dumps(found.as_object(), indent=2))
        else:
            console.print(_table(found))
        if report is not None:
            report.write_text(
                as_markdown(found, _command(settings, loading, n, only, methods, naive, chat, lengths, sweep, critics))
            )
            console.print(f"[dim]written to {escape(str(report))}[/]")
        if plot is not None:
            (save_sweep if sweep else save_lengths)(found, plot)
            console.print(f"[dim]drawn to {escape(str(plot))}[/]")


def _scenarios(only: list[str] | None, *, sweep: bool, critics: bool) -> list[WorkflowScenario]:
    if critics and not sweep:
        raise InvalidRequestError("--critics is for --sweep: the workflows of the paper have voters that are all alike")
    found = [tree(b, v, critics=critics) for b in SWEEP_BRANCHES for v in SWEEP_VOTERS] if sweep else list(PAPER)
    chosen = [each for each in found if not only or any(part.lower() in each.name.lower() for part in only)]
    if not chosen:
        raise InvalidRequestError(f"no workflow is named so: there are {', '.join(each.name for each in found)}")
    return chosen


def _methods(names: str) -> list[MethodName]:
    asked = {name.strip() for name in names.split(",")}
    chosen = [method for method in METHODS if method in asked]
    unknown = asked - set(METHODS)
    if unknown:
        raise InvalidRequestError(f"there is no method {min(unknown)!r}: there are {', '.join(METHODS)}")
    return chosen


@contextmanager
def _loaded(
    console: Console, name: str, loading: Loading, chat: int
) -> Iterator[tuple[LoadedModel, ChatHuggingFaceDebate | None]]:
    """A model by name, random weights drawn anew; and the same as a `ChatHuggingFace` if that is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        with console.status(f"loading [b]{name}[/b] ..."):
            path: str | Path = name
            if name in SHAPES:
                path = Path(folder) / name
                save_random_llama(SHAPES[name], path, positions=1 << 15, dtype=loading.torch_dtype or torch.bfloat16)
            loaded = loading.model(path)
            rival = None
            if chat:
                try:
                    found = WEIGHTS if name == "embedded" else Path(path)
                    served = loaded.adapter
                    rival = ChatHuggingFaceDebate(found, served.geometry.dtype, str(served.device))
                except Absent as reason:
                    console.print(f"[yellow]not measured: {ChatHuggingFaceDebate.name}: {reason}[/]")
        yield loaded, rival
        if rival is not None:
            rival.close()


def _versions() -> dict[str, Any]:
    return {"torch": torch.__version__, "transformers": version("transformers"), "langgraph": version("langgraph")}


def _table(found: WorkflowReport) -> Table:
    """Without the columns that a terminal has no room for."""
    shown = [place for place, column in enumerate(COLUMNS) if column not in _LEFT_OUT]
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place in shown:
        table.add_column(COLUMNS[place], justify="left" if place < 2 else "right")
    for row in found.rows():
        table.add_row(*(row[place] for place in shown))
    return table


_LEFT_OUT = ("tokens reused",)


def _command(
    settings: dict[str, Any],
    loading: Loading,
    n: int,
    only: list[str] | None,
    methods: str,
    naive: int | None,
    chat: int,
    lengths: list[Lengths],
    sweep: bool,
    critics: bool,
) -> str:
    """The command that measures the same again."""
    words = [f"choreo bench workflows --model {shlex.quote(settings['model'])}", *loading.words(), f"--n {n}"]
    words += [f"--methods {methods}"] if methods != ",".join(METHODS) else []
    words += [f"--naive {naive}"] if naive is not None else []
    words += [f"--chat {chat}"] if chat else []
    words += [f"--only {shlex.quote(each)}" for each in only or []]
    words += ["--sweep"] * sweep + ["--critics"] * critics
    words += [f"--system {lengths[0].system} --problem {lengths[0].problem}"]
    words += [f"--utterance {','.join(str(each.utterance) for each in lengths)} --threads {settings['threads']}"]
    words += [f"--kv-gib {settings['kv_gib']:g}"]
    return " ".join(words)
