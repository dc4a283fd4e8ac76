"""`choreo run debate`: a debate live, and what it costs under every method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from choreo_agents.cli.run_workflow import LiveTable, run_case, task_panel
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
from choreo_agents.terminal.tables import titled
from choreo_agents.terminal.waiting import importing
from choreo_agents.workflows.cases import CASES
from choreo_agents.workflows.cases.debate import REPORTS

if TYPE_CHECKING:
    from choreo_agents.engine.settings import MethodName
    from choreo_agents.workflows.comparing import Comparison
    from choreo_agents.workflows.debating import Debated, DebateRun, DebateSetting
    from choreo_agents.workflows.running import RunCost

_REPEATS = 5
_FIGURES = ("tokens_encoded", "tokens_reused", "ttft_mean_s", "end_to_end_s")
"""Of a method, as `--json` gives them."""


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
    costs = {method: run.cost} if comparison is None else comparison.costs
    ratios = {} if comparison is None else {twin: asdict(comparison.ratios(twin)) for twin in costs if twin != "choreo"}
    return {
        "question": setting.problem.question,
        "record_tokens": _record_tokens(setting),
        "answer": run.answer,
        "correct": run.correct,
        "messages": [{"round": u.round, "agent": u.agent, "words": u.words} for u in run.utterances],
        "methods": {name: {figure: getattr(cost, figure) for figure in _FIGURES} for name, cost in costs.items()},
        "ratios": ratios,
    }


class DebateDisplay(LiveTable):
    """One column an agent, one row a round; cells fill while the agents speak."""

    def __init__(self, console: Console, problem: Debated, rounds: int) -> None:
        self._problem = problem
        self._words: dict[str, dict[str, str]] = {agent: {} for agent in problem.agents}
        self._costs: dict[str, list[str]] = {agent: [] for agent in problem.agents}
        self._rounds = rounds
        super().__init__(console)

    def add(self, agent: str, message_id: str, text: str) -> None:
        """Append a piece of text to an agent's message."""
        if agent in self._words:
            said = self._words[agent]
            said[message_id] = said.get(message_id, "") + text
            self._live.update(self._table())

    def told(self, cost: Mapping[str, Any]) -> None:
        """Note what an agent read for the message that it has just said."""
        if cost["agent"] in self._costs:
            read, encoded = cost["tokens_reused"], cost["tokens_encoded"]
            self._costs[cost["agent"]].append(f"{read:,} read, {encoded:,} encoded")
            self._live.update(self._table())

    def _table(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        table.add_column("round", justify="right", style="dim")
        for agent in self._problem.agents:
            table.add_column(agent, ratio=1, overflow="fold")
        for number in range(self._rounds):
            table.add_row(str(number + 1), *(self._cell(agent, number) for agent in self._problem.agents))
        return table

    def _cell(self, agent: str, number: int) -> Text:
        words, costs = list(self._words[agent].values()), self._costs[agent]
        if number >= len(words):
            heard = all(len(done) >= number for done in self._costs.values())
            return Text("reads ..." if heard else "", style="dim")
        right = self._problem.is_correct(words[number])
        over = number < len(costs)
        shown = Text(words[number].strip(), style="green" if right else "yellow" if over else "")
        shown.append(f"\n{costs[number]}" if over else " ...", style="not bold dim default")
        return shown


def opening(problem: Debated, record_tokens: int, model: str, method: str) -> RenderableType:
    """The question, what all agents read, and what each was told alone."""
    rows = [("asked", Text(problem.question))]
    if problem.record:
        begins = " ".join(problem.record[0].split()[:14])
        held = f"{len(problem.record)} reports, {record_tokens:,} tokens, read by all: "
        rows.append(("record", Text.assemble(held, (f"{begins} ...", "dim"))))
    rows += [(agent, Text(notes, style="dim")) for agent, notes in zip(problem.agents, problem.notes, strict=True)]
    return task_panel(f"a debate on {escape(model)}, method {method}", rows)


def verdict(run: DebateRun, problem: Debated, method: str) -> Text:
    """The final answer, and whether it is right."""
    mark = ("right", "bold green") if run.correct else (f"wrong: {problem.answer}", "bold red")
    return Text.assemble(f"final answer ({method}): ", (run.answer, "bold"), "  ", mark)


def cost_table(comparison: Comparison) -> RenderableType:
    """Counts and times by method, with what each twin took in units of choreo's."""
    costs = comparison.costs
    figures = (*costs, "baseline/choreo", "naive/choreo")
    table = titled("the baseline's words under three methods", ("", *figures), figures)
    rows: list[tuple[str, Callable[[RunCost], float], str]] = [
        ("tokens encoded", lambda cost: cost.tokens_encoded, ",.0f"),
        ("tokens reused", lambda cost: cost.tokens_reused, ",.0f"),
        ("first token, ms", lambda cost: cost.ttft_mean_s * 1e3, ".1f"),
        ("end to end, ms", lambda cost: cost.end_to_end_s * 1e3, ".0f"),
    ]
    for label, figure, style in rows:
        values = {method: figure(cost) for method, cost in costs.items()}
        ratios = (
            [f"{values[twin] / values['choreo']:.2f}x" for twin in ("baseline", "naive")]
            if label != "tokens reused"
            else []
        )
        table.add_row(label, *(format(value, style) for value in values.values()), *ratios)
    note = Text(
        "choreo: views of one KV cache. baseline: text with a prefix cache. naive: text without one.\n"
        f"Times are medians of {comparison.repeats} runs of each method, taken in turn on fresh engines; "
        "all decode the same tokens.\nFirst token: mean, from a node's start, encoding of what it reads included.",
        style="dim",
    )
    return Group(table, note)


def summary(comparison: Comparison) -> Text:
    """One sentence on what was seen, whichever way it went."""
    cached, plain = comparison.ratios("baseline"), comparison.ratios("naive")
    encoded = _times(cached.tokens_encoded, "fewer", "more", "as many")
    spoke, ended, ended_plain = (
        _times(ratio, "sooner", "later", "as soon") for ratio in (cached.ttft_mean, cached.end_to_end, plain.end_to_end)
    )
    return Text(
        f"Against text with a prefix cache, choreo encoded {encoded} tokens, its agents' first words came {spoke} and "
        f"the whole debate was over {ended}; against text without one it was over {ended_plain}."
    )


def _times(ratio: float, more: str, less: str, same: str) -> str:
    """How many times as much something else took, as a person says it."""
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"
