"""`choreo bench`: scenarios with figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from choreo_agents.engine.settings import MethodName
from choreo_agents.lab.evaluation import Difference, Score
from choreo_agents.lab.experiments.bench_debate.measure import Accuracy, score_debates
from choreo_agents.lab.language.tasks.record_debate import REPORTS, debate_drawn
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import AgentsOption, ModelOption, RoundsOption, errors_as_lines, reports_option
from choreo_agents.workflows.comparing import METHODS


@takes_loading
def debate(
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", min=1, help="Debates per method.")] = 100,
    agents: AgentsOption = 3,
    rounds: RoundsOption = 2,
    reports: Annotated[int, reports_option(REPORTS)] = REPORTS,
    seed: Annotated[int, typer.Option(max=2**62, help="Seed of the first debate; the others follow.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """How often debates end in the right answer: agents that share caches, and agents that pass text.

    They debate over a record of reports and have notes of their own, as in [b]choreo run debate[/b]. Every method
    decodes freely. naive says the same as baseline, which only encodes less; it is left out.
    """
    console = Console(stderr=as_json, highlight=False)
    methods: list[MethodName] = [method for method in METHODS if method != "naive"]
    with errors_as_lines(console):
        loaded = load(console, model, loading)
        scores: dict[MethodName, Accuracy] = {}
        with Progress(console=console, transient=True) as progress:
            for method in methods:
                task = progress.add_task(f"debates, {method}", total=n)
                scores[method] = score_debates(
                    loaded,
                    method,
                    partial(debate_drawn, agents=agents, reports=reports),
                    count=n,
                    rounds=rounds,
                    seed=seed,
                    on_progress=partial(progress.advance, task),
                )
        difference = scores["choreo"].over(scores["baseline"])
        if as_json:
            found = {method: _object(score) for method, score in scores.items()}
            typer.echo(json.dumps(found | {"difference": _difference(difference)}, indent=2))
            return
        record = f" over {reports} reports" if reports else ""
        title = f"{n} debates of {agents} agents in {rounds} rounds{record}; in brackets 95 % intervals"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for column in ("method", "final answer right", "first agent's first answer right", "gain"):
            table.add_column(column)
        for method, score in scores.items():
            table.add_row(method, _words(score.final), _words(score.first_answer), _points(score.gain))
        console.print(table)
        console.print(f"choreo - baseline, final answers of the same debates: {_points(difference)}")


def _object(score: Accuracy) -> dict[str, Any]:
    """A method's scores as `--json` gives them."""
    return {
        "final": asdict(score.final),
        "first_answer": asdict(score.first_answer),
        "gain": asdict(score.gain),
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return asdict(difference) | {"share": difference.share, "interval": difference.interval()}


def _words(score: Score) -> str:
    low, high = score.interval()
    return f"{score.share:.0%}  [dim]({low:.0%} to {high:.0%})[/]"


def _points(gain: Difference) -> str:
    low, high = gain.interval()
    return f"{100 * gain.share:+.0f} points  [dim]({100 * low:+.0f} to {100 * high:+.0f})[/]"
