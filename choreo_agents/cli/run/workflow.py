"""`choreo run WORKFLOW`, for every workflow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from choreo_agents.cli.commands import CASES, SCORE_ITEMS
from choreo_agents.cli.lazy import found
from choreo_agents.cli.run.message_display import PlayDisplay, ending, opening
from choreo_agents.engine import Engine, Memory
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
from choreo_agents.terminal.options import ModelOption, errors_as_lines
from choreo_agents.workflows.case import Case
from choreo_agents.workflows.playing import make_setup, play, read_items, require_variants

OWN_DISPLAYS: Mapping[str, str] = {"debate": "choreo_agents.cli.run.debate:debate"}
"""Commands of workflows that are shown in a way of their own; all others are shown message by message."""


@takes_loading
def run_case(
    case: Case,
    make_options: MakeOptions,
    model: ModelOption = "embedded",
    method: Annotated[str, typer.Option(help="How it is served; [b]choreo eval[/b] compares them.")] = "choreo",
    seed: Annotated[int, typer.Option(max=2**62, help="Draws the task and what is sampled.")] = 0,
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
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if inputs is not None or out is not None:
            items = None if inputs is None else read_items(case, inputs)
            found(SCORE_ITEMS)(
                console, case, make_options(), [method], items, 1, seed, out, None, as_json=as_json, split="test",
                setup=(model, loading, prompts, temperature, top_p, max_tokens, kv_gib),
            )  # fmt: skip
            return
        [variant] = require_variants(case, method)
        options = make_options()
        loaded = load(console, model, loading)
        setup = make_setup(case, options, loaded, prompts, temperature, top_p, max_tokens).changed(
            case.variants[variant]
        )
        item = case.draw(setup.options, "test", seed)
        console.print(opening(case, item, model, variant))
        served = case.variants[variant].method
        budget = int(kv_gib * (1 << 30))
        with (
            Engine.load(loaded, method=served, memory=Memory(kv_budget_bytes=budget)) as engine,
            PlayDisplay(console) as display,
        ):
            result, spoken, cost = asyncio.run(play(engine, setup, item, seed=seed, on_token=display.add))
        console.print(ending(case, result, cost))
        if as_json:
            told = {"item": item.model_dump(), "result": asdict(result), "messages": spoken, "cost": asdict(cost)}
            typer.echo(json.dumps(told, indent=2))


def run_doc(case: Case) -> str:
    """What `--help` says of a workflow."""
    spelled = case.name.replace("_", "-")
    return (
        f"{case.summary}\n\nThe task is drawn from the embedded language, and shown as it is worked on. With --inputs "
        "every line of a file is worked on, many at a time, and results go to --out.\n\n"
        f"Methods: {', '.join(case.variants)}.\n\n[b]Examples[/b]\n\n  choreo run {spelled} --seed 7\n"
        f"  choreo run {spelled} --model path/or/hub-name --inputs items.jsonl --out results.jsonl"
    )


def run_workflow(name: str) -> Callable[..., None]:
    """The command that runs a workflow."""
    if name in OWN_DISPLAYS:
        own: Callable[..., None] = found(OWN_DISPLAYS[name])
        return own
    case: Case = found(CASES)[name]
    return command_of(case, run_case, run_doc(case))
