"""`choreo run debate`: a debate live, and what it costs under every method."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from choreo_agents.cli.run.workflow import run_case
from choreo_agents.terminal.case_options import (
    AgentsOption,
    InputsOption,
    JsonOption,
    MaxTokensOption,
    OutOption,
    PromptsOption,
    RoundsOption,
)
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, errors_as_lines
from choreo_agents.terminal.waiting import importing
from choreo_agents.workflows.cases import CASES
from choreo_agents.workflows.cases.debate import REPORTS

if TYPE_CHECKING:
    from choreo_agents.engine.settings import MethodName
    from choreo_agents.workflows.comparing import Comparison
    from choreo_agents.workflows.debating import DebateRun, DebateSetting

_REPEATS = 5


@takes_loading
def debate(
    model: ModelOption = "embedded",
    method: Annotated[
        Literal["choreo", "baseline", "naive"],
        typer.Option(
            metavar="METHOD",
            help="[b]choreo[/b]: agents read each other's KV cache. [b]baseline[/b]: they re-encode each other's text, "
            "with a prefix cache. [b]naive[/b]: without one.",
        ),
    ] = "choreo",
    agents: AgentsOption = 3,
    rounds: RoundsOption = 2,
    reports: Annotated[
        int,
        typer.Option(min=1, max=REPORTS, help="Of the record that all agents read, about 98 tokens each."),
    ] = REPORTS,
    seed: Annotated[int, typer.Option(max=2**32 - 1, help="Chooses one of twenty records, questions and notes.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each method in the comparison.")] = _REPEATS,
    inputs: InputsOption = None,
    out: OutOption = None,
    prompts: PromptsOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of all that is said about --inputs.")] = 0.7,
    max_tokens: MaxTokensOption = None,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="Only hold the debate.")] = False,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Agents answer in parallel rounds, each hearing the others' last answers (MADpar).

    They debate over one record. All read the same reports; each agent also has notes of its own, as a private system
    prompt: one knows the answer, a minority is wrong (of two agents, nobody), and the others have to find it in the
    record. In every round all of them speak at once, seeing what the others said last. Then the debate as the baseline
    holds it is repeated, word for word, under all three methods, and a table shows what each had to encode. A prefix
    cache cannot share the record: it stands behind each agent's own prompt.

    [dim]The embedded model was never trained to read caches, so sharing them costs it accuracy: compare
    the two final answers.[/dim]

    [b]Examples[/b]

      choreo run debate --seed 1
      choreo run debate --method baseline --no-compare
      choreo run debate --agents 5 --rounds 3 --json
      choreo run debate --reports 1
      choreo run debate --inputs questions.jsonl --out answers.jsonl
    """
    if inputs is not None or out is not None:
        if no_compare or reports != REPORTS or repeats != _REPEATS:
            raise typer.BadParameter(
                "--reports, --repeats and --no-compare are for our debates over a record, not for --inputs"
            )
        case = CASES["debate"]
        options = case.options.model_validate({"agents": agents, "rounds": rounds})
        sampling: Any = {"temperature": temperature, "max_tokens": max_tokens}
        kept: Any = {"inputs": inputs, "out": out, "prompts": prompts, "as_json": as_json, "loading": loading}
        run_case(case, lambda: options, model, method, seed, **kept, **sampling)
        return
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.cli.run.debate_display import cost_table, summary, verdict
        from choreo_agents.workflows.debating import DebateSetting, problem_of

    with errors_as_lines(console):
        problem = problem_of(seed, agents=agents, reports=reports)
        setting = DebateSetting(load(console, model, loading), problem, rounds, seed=seed)
        run = _hold_live(console, setting, method, model)
        comparison = None if no_compare else _compare(console, setting, repeats)
        if as_json:
            typer.echo(json.dumps(_json(setting, run, method, comparison), indent=2))
        elif comparison is not None:
            if method != "baseline":
                console.print(verdict(comparison.baseline, problem, "baseline"))
            console.print()
            console.print(cost_table(comparison))
            console.print()
            console.print(summary(comparison))


def _hold_live(console: Console, setting: DebateSetting, method: MethodName, model: str) -> DebateRun:
    from choreo_agents.cli.run.debate_display import DebateDisplay, opening, verdict
    from choreo_agents.workflows.debating import hold

    problem = setting.problem
    console.print(opening(problem, _record_tokens(setting), model, method))
    with DebateDisplay(console, problem, setting.rounds) as display:
        run = hold(setting, method, on_token=display.add, on_decode=display.told)
    console.print(verdict(run, problem, method))
    return run


def _record_tokens(setting: DebateSetting) -> int:
    model = setting.model
    return sum(len(model.encode(model.chat.turn("user", report))) for report in setting.problem.record)


def _compare(console: Console, setting: DebateSetting, repeats: int) -> Comparison:
    from choreo_agents.workflows.comparing import compare, runs

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("the same words under three methods", total=runs(repeats))
        return compare(setting, repeats=repeats, on_progress=lambda: progress.advance(task))


def _json(setting: DebateSetting, run: DebateRun, method: MethodName, comparison: Comparison | None) -> dict[str, Any]:
    from choreo_agents.cli.run.debate_display import cost_object
    from choreo_agents.workflows.comparing import TWINS

    costs = {method: run.cost} if comparison is None else comparison.costs
    ratios = {} if comparison is None else {twin: asdict(comparison.ratios(twin)) for twin in TWINS}
    return {
        "question": setting.problem.question,
        "record_tokens": _record_tokens(setting),
        "answer": run.answer,
        "correct": run.correct,
        "messages": [{"round": u.round, "agent": u.agent, "words": u.words} for u in run.utterances],
        "methods": {name: cost_object(cost) for name, cost in costs.items()},
        "ratios": ratios,
    }
