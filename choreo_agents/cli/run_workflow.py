"""`choreo run WORKFLOW`, for every workflow."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from choreo_agents.terminal.case_options import (
    BudgetOption,
    InputsOption,
    JsonOption,
    MakeOptions,
    MaxTokensOption,
    OutOption,
    PromptsOption,
    TemperatureOption,
    TopPOption,
    command_of,
)
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, bar, errors_as_lines
from choreo_agents.terminal.waiting import importing
from choreo_agents.workflows.case import Case, Item, Result
from choreo_agents.workflows.cases import problem

if TYPE_CHECKING:
    from choreo_agents.engine import Engine
    from choreo_agents.training.journal import Journal
    from choreo_agents.workflows.many import PlayProgress
    from choreo_agents.workflows.playing import Setup
    from choreo_agents.workflows.running import RunCost


@takes_loading
def run_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    method: Annotated[str, typer.Option(help="How it is served; [b]choreo eval[/b] compares them.")] = "choreo",
    seed: Annotated[
        int, typer.Option(max=2**32 - 1, help="Chooses one of twenty tasks, and draws what is sampled.")
    ] = 0,
    inputs: InputsOption = None,
    out: OutOption = None,
    prompts: PromptsOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    max_tokens: MaxTokensOption = None,
    kv_gib: BudgetOption = 1.0,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    shown = inputs is not None and (out is None or as_json)
    console = Console(stderr=as_json or shown, highlight=False)
    with importing(console):
        from choreo_agents.engine import Engine, Memory
        from choreo_agents.training.journal import Journal
        from choreo_agents.workflows.playing import make_setup, play, read_items, require_variants

    with errors_as_lines(console):
        variant, *more = require_variants(case, method)
        if more:
            raise ValueError(f"--method takes one of {', '.join(case.variants)}: choreo eval compares several")
        if inputs is None and out is not None:
            raise ValueError("--out keeps the results of many items: give a file of them with --inputs")
        items = [] if inputs is None else read_items(case, inputs)
        options = make_options()
        loaded = load(console, model, loading)
        made = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens)
        setup = made.changed(case.variants[variant])
        served, memory = case.variants[variant].method, Memory(kv_budget_bytes=int(kv_gib * (1 << 30)))
        with Engine.load(loaded, method=served, memory=memory) as engine:
            if items:
                with Journal(out, made.as_settings(loaded) | {"seed": seed}) as journal:
                    _play_all(console, engine, setup, variant, items, seed, journal, shown=shown)
                return
            item = problem(case.name, seed)
            console.print(opening(case, item, model, variant))
            with PlayDisplay(console) as display:
                result, spoken, cost = asyncio.run(play(engine, setup, item, seed=seed, on_token=display.add))
        console.print(ending(case, result, cost))
        if as_json:
            told = {"item": item.model_dump(), "result": asdict(result), "messages": spoken, "cost": asdict(cost)}
            typer.echo(json.dumps(told, indent=2))


def _play_all(
    console: Console,
    engine: Engine,
    setup: Setup,
    variant: str,
    items: Sequence[Item],
    seed: int,
    journal: Journal,
    *,
    shown: bool,
) -> None:
    """Play a file of items under a bar; results that are shown are lines of JSON, in the order of the items."""
    from choreo_agents.workflows.many import content_of, play_items, require_known, seeds_of

    contents = [content_of(item) for item in items]
    require_known(journal, variant, items, contents)
    try:
        with bar(console) as progress:
            task = progress.add_task(variant, total=len(items))

            def advance(so_far: PlayProgress) -> None:
                progress.update(task, completed=so_far.finished)

            seeds = seeds_of(items, seed)
            asyncio.run(play_items(engine, setup, variant, items, contents, seeds, journal, advance))
    finally:
        keys = [f"{variant} | {item.id}" for item in items]
        records = [journal.records[key] for key in keys if key in journal]
        if shown:
            for record in records:
                typer.echo(json.dumps(record, ensure_ascii=False))
    scores = [record["score"] for record in records if record["score"] is not None]
    worth = f"{setup.case.scored}: {mean(scores):.1%} of {len(scores)}" if scores else "nothing to judge them by"
    where = "" if journal.path is None else f"; results are in {escape(str(journal.path))}"
    console.print(f"{len(items)} items, {worth}{where}")
    if failed := [record for record in records if "error" in record]:
        console.print(f"[red]{len(failed)} could not be played[/]; the first: ", end="")
        console.print(f"{failed[0]['item']}: {failed[0]['error']}", markup=False)
    if len(failed) == len(items):
        raise typer.Exit(1)


def run_doc(case: Case) -> str:
    """What `--help` says of a workflow."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nThe task is one of twenty in the embedded model's language, and shown as it is worked on. "
        "With --inputs every line of a file is worked on, many at a time; each result is a line of JSON, in --out or "
        "else on stdout.\n\n"
        f"Methods: {', '.join(case.variants)}.\n\n[b]Examples[/b]\n\n  choreo run {spelled} --seed 7\n"
        f"  choreo run {spelled} --model path/or/hub-name --inputs items.jsonl --out results.jsonl"
    )


def run_workflow(case: Case) -> Callable[..., None]:
    """The command that runs a workflow."""
    return command_of(case, run_case, run_doc(case))


class LiveTable(ABC):
    """A table on the terminal that changes while things go on."""

    def __init__(self, console: Console) -> None:
        self._live = Live(self._table(), console=console, refresh_per_second=20, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()  # without a cursor to move, the last frame ends in the middle of a line

    @abstractmethod
    def _table(self) -> RenderableType:
        """Return what is shown now."""


class PlayDisplay(LiveTable):
    """One row a message, in the order in which their first words came; rows fill side by side."""

    def __init__(self, console: Console) -> None:
        self._nodes: dict[str, str] = {}
        self._words: dict[str, str] = {}
        super().__init__(console)

    def add(self, node: str, message_id: str, text: str) -> None:
        """Append a piece of text to a node's message."""
        self._nodes.setdefault(message_id, node)
        self._words[message_id] = self._words.get(message_id, "") + text
        self._live.update(self._table())

    def _table(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
        for message_id, node in self._nodes.items():
            table.add_row(node, Text(self._words[message_id].strip()))
        return table


def opening(case: Case, item: Item, model: str, variant: str) -> RenderableType:
    """What is to be done."""
    from choreo_agents.workflows.playing import item_words

    rows = [(name, Text(words)) for name, words in item_words(item) if name not in ("answer", "answers", "concepts")]
    return task_panel(f"{case.name.replace('_', ' ')} on {escape(model)}, {variant}", rows)


def task_panel(title: str, rows: Iterable[tuple[str, Text]]) -> RenderableType:
    """Show what is to be done: names and what they stand for."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="bold")
    lines.add_column()
    for row in rows:
        lines.add_row(*row)
    return Panel(lines, title=title, title_align="left", expand=False)


def ending(case: Case, result: Result, cost: RunCost) -> Text:
    """How it ended, and what it cost."""
    mark = ("", "")
    if result.score is not None:
        style = "bold green" if result.score >= 1 else "bold red" if result.score <= 0 else "bold yellow"
        mark = (f"  {case.scored}: {result.score:.0%}", style)
    parts = "".join(f", {name} {share:.0%}" for name, share in result.parts.items())
    waits = 1000 * sum(cost.ttft_s) / max(1, len(cost.ttft_s))
    spent = (
        f"\n{cost.tokens_encoded:,} tokens encoded, {cost.tokens_reused:,} reused; {waits:.0f} ms to the first token, "
        f"{cost.end_to_end_s:.2f} s in all, {cost.rows_per_decode_step:.1f} calls a decode step"
    )
    return Text.assemble("answer: ", (result.answer, "bold"), mark, (parts, "dim"), (spent, "dim"))
