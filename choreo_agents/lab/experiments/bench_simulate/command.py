"""`choreo bench simulate`."""

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

from choreo_agents.lab.experiments.bench_simulate.measure import ENGINES, SimulateBench
from choreo_agents.lab.experiments.bench_simulate.report import COLUMNS, SimulateReport, as_markdown
from choreo_agents.lab.experiments.bench_workflows.scenarios import Lengths
from choreo_agents.lab.simulating.costs import read_costs
from choreo_agents.lab.simulating.installed import require_simpy
from choreo_agents.lab.simulating.measuring import QUICK_PROBE, USUAL_PROBE
from choreo_agents.lab.timing.model import timed_model
from choreo_agents.models.random_llama import SHAPES
from choreo_agents.terminal.loading import USUAL, Loading, device_name, dtype_name, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, require_writable
from choreo_agents.training.journal import Journal

_USUAL = Lengths(16, 32, 24)
_TURN = 16
"""Tokens around a turn at most."""


@takes_loading
def bench_simulate(
    model: Annotated[
        str, typer.Option(help=f"[b]embedded[/b], a random Llama ({', '.join(SHAPES)}), or a checkpoint.")
    ] = "embedded",
    debates: Annotated[int, typer.Option(min=1, help="Held at once.")] = 32,
    agents: Annotated[int, typer.Option(min=2, max=8, help="Of each debate.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Of each debate.")] = 3,
    system: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt.")] = _USUAL.system,
    problem: Annotated[int, typer.Option(min=1, help="Tokens of a question.")] = _USUAL.problem,
    utterance: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = _USUAL.utterance,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, each on other words.")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="Measure costs less often: to see it work.")] = False,
    costs: Annotated[
        list[Path] | None,
        typer.Option("--costs", metavar="FILE", help="Costs that were measured before, in place of new ones."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the words.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every round to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """Whether simulated engines take as long as real ones: debates on one engine and over two, beside what is foretold.

    Each round measures what work costs, records debates one after the other, and holds the same at once on one engine
    and over two. What [b]choreo simulate[/b] says of the recording, by these costs, stands beside what was measured.
    The two engines are in this process: what they take from each other is measured, too.

    [b]Examples[/b]

      choreo bench simulate --debates 4 --repeats 1 --quick
      choreo bench simulate --out rounds.jsonl --report simulate.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        require_simpy()
        require_writable(report)
        torch.set_num_threads(threads)
        lengths = Lengths(system, problem, utterance)
        given = [read_costs(path) for path in costs or ()]
        longest = system + problem + (agents + 1) * (utterance + _TURN) + 2 * _TURN
        with timed_model(console, model, loading, longest, "a shorter --utterance") as (loaded, _):
            settings = {
                "model": model,
                "weights": loaded.adapter.fingerprint if model not in SHAPES else "random",
                "dtype": dtype_name(loaded.adapter.geometry.dtype),
                "threads": threads,
                "device": device_name(loaded.adapter.device),
                "debates": debates,
                "agents": agents,
                "rounds": rounds,
                **asdict(lengths),
                "quick": quick,
                "costs": [file.model_dump(mode="json") for file in given],
                "seed": seed,
                **{name: version(name) for name in ("torch", "transformers", "langgraph", "simpy")},
            }
            probe = None if given else QUICK_PROBE if quick else USUAL_PROBE
            bench = SimulateBench(loaded, lengths, debates, agents, rounds, seed, probe, given)
            with Journal(out, settings) as journal, bar(console) as progress:
                shown = progress.add_task("", total=repeats * len(ENGINES))
                bench.measure(journal, repeats, lambda what: progress.update(shown, advance=1, description=what))
            # A journal may hold more than was asked for.
            found = SimulateReport(settings, [journal.records[str(number)] for number in range(repeats)])
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, loading, repeats, costs)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=2))
        return
    table = Table(box=box.SIMPLE_HEAD, title=found.title(), title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place > 1 else "left")
    for row in found.rows():
        table.add_row(*row)
    console.print(table)
    for line in found.lines():
        console.print(line)


def _command(settings: dict[str, Any], loading: Loading, repeats: int, costs: list[Path] | None) -> str:
    """The command that measures the same again."""
    words = [f"choreo bench simulate --model {shlex.quote(settings['model'])}", *loading.words()]
    words += [f"--{name} {settings[name]}" for name in ("debates", "agents", "rounds", *asdict(_USUAL))]
    words += [f"--costs {shlex.quote(str(path))}" for path in costs or ()]
    words += ["--quick"] if settings["quick"] else []
    return " ".join([*words, f"--repeats {repeats} --seed {settings['seed']} --threads {settings['threads']}"])
