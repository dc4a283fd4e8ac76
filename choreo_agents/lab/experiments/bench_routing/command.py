"""`choreo bench routing`."""

from __future__ import annotations

import json
import shlex
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.experiments.bench_routing.measure import RoutingBench
from choreo_agents.lab.experiments.bench_routing.report import FIGURES, RoutingReport, as_markdown
from choreo_agents.lab.experiments.bench_routing.workloads import WORKLOADS, lengths_of, record_workload
from choreo_agents.lab.experiments.bench_workflows.scenarios import Lengths
from choreo_agents.lab.simulating.costs import as_plain, known_costs, read_costs
from choreo_agents.lab.simulating.installed import require_simpy
from choreo_agents.lab.simulating.rules import RULES
from choreo_agents.lab.simulating.trace import RecordedTrace, hurried, read_trace
from choreo_agents.models import LoadedModel
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import bar, errors_as_lines, numbers, require_writable
from choreo_agents.training.journal import Journal

_USUAL = Lengths(32, 64, 48)


@takes_loading
def routing(
    costs: Annotated[
        list[Path] | None,
        typer.Option("--costs", metavar="FILE", help="As for [b]choreo simulate[/b]; what none says is guessed."),
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="They may be another model's: to ask what if.")
    ] = False,
    engines: Annotated[str, typer.Option("--engines", help="How many, with commas between.")] = "1,4,16,64",
    loads: Annotated[
        str, typer.Option("--load", help="Runs begun in a second, as shares of what so many engines can do.")
    ] = "0.3,0.7",
    rules: Annotated[str, typer.Option("--rules", help="Which, with commas between.")] = ",".join(RULES),
    per_engine: Annotated[int, typer.Option("--per-engine", min=1, help="Runs for each engine.")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="Recorded of each workload, on the embedded model.")] = 2,
    trunk: Annotated[int, typer.Option(min=1, help="Tokens of the document that many Sends read.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of when runs begin.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every simulation to this JSONL file, and go on where it stops.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """What each rule for placing calls is worth: recorded workloads, simulated on several numbers of engines.

    Debates, a tree of thoughts, a plan whose parts are merged, and many Sends over a large document are recorded on the
    embedded model. Runs of them begin at random moments; fronts and directory cost nothing, so that rules are compared.

    [b]Examples[/b]

      choreo bench routing --engines 1,4 --per-engine 2
      choreo bench routing --costs costs.json --out routing.jsonl --report routing.md
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        require_simpy()
        require_writable(report)
        chosen = rules.split(",")
        if wrong := [rule for rule in chosen if rule not in RULES]:
            raise InvalidRequestError(f"there is no rule {wrong[0]!r}: there are {', '.join(RULES)}")
        shares, counts = _shares(loads), numbers(engines)
        torch.set_num_threads(1)
        files = [read_costs(path) for path in costs or ()]
        with tempfile.TemporaryDirectory() as folder, bar(console) as progress:
            traces = _recorded(load(console, "embedded", loading), Path(folder), runs, trunk, progress)
            known = known_costs(files, next(iter(traces.values())).header, any_model=any_model)
            bench = RoutingBench(traces, known.costs, counts, shares, chosen, per_engine, seed)
            settings = {
                "workloads": list(traces),
                "costs": as_plain(bench.played),
                "engines": bench.engines,
                "loads": bench.loads,
                "rules": chosen,
                "per_engine": per_engine,
                "runs": runs,
                "trunk": trunk,
                "seed": seed,
                "simpy": version("simpy"),
            }
            with Journal(out, settings) as journal:
                shown = progress.add_task("", total=bench.cells)
                bench.measure(journal, lambda what: progress.update(shown, advance=1, description=what))
            found = RoutingReport(settings, journal.records)
        if report is not None:
            report.write_text(as_markdown(found, _command(settings, costs or (), any_model=any_model)))
            console.print(f"[dim]written to {escape(str(report))}[/]")
    if as_json:
        typer.echo(json.dumps(found.as_object(), indent=2))
        return
    for figure, (what, _) in FIGURES.items():
        table = Table(box=box.SIMPLE_HEAD, title=what, title_justify="left")
        for place, column in enumerate(found.columns()):
            table.add_column(column, justify="right" if place else "left")
        for row in found.rows(figure):
            table.add_row(*(each.replace("**", "") for each in row))
        console.print(table)
    for line in (*found.lines(), *known.notes):
        console.print(line, soft_wrap=True)


def _recorded(model: LoadedModel, folder: Path, runs: int, trunk: int, progress: Progress) -> dict[str, RecordedTrace]:
    task = progress.add_task("recording", total=runs * len(WORKLOADS))
    found: dict[str, RecordedTrace] = {}
    for number, workload in enumerate(WORKLOADS):
        path = folder / f"{number}.jsonl"
        record_workload(
            model, workload, lengths_of(workload, _USUAL, trunk), runs, path, lambda: progress.update(task, advance=1)
        )
        # Functions of these graphs wait for nobody: what they took was the machine's noise.
        found[workload] = hurried(read_trace(path))
    return found


def _shares(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < share < 10 for share in found):
        raise InvalidRequestError(f"--load are shares above 0, with commas between, as 0.3,0.7, not {text!r}")
    return found


def _command(settings: dict[str, Any], costs: Any, *, any_model: bool) -> str:
    """The command that does the same again."""
    words = ["choreo bench routing", *(f"--costs {shlex.quote(str(path))}" for path in costs)]
    words += ["--any-model"] if any_model else []
    for option, name in (("engines", "engines"), ("load", "loads"), ("rules", "rules")):
        words.append(f"--{option} {','.join(f'{each}' for each in settings[name])}")
    words += [f"--{name.replace('_', '-')} {settings[name]}" for name in ("per_engine", "runs", "trunk", "seed")]
    return " ".join(words)
