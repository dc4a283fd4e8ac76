"""Turns a workflow's pydantic options into command-line options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from choreo_agents.terminal.options import option_of
from choreo_agents.workflows.cases import CHAT_TOKENS, EMBEDDED_TOKENS, Case, Options

MakeOptions = Callable[[], Options]
InputsOption = Annotated[
    Path | None, typer.Option("--inputs", help="Items of your own, a JSON object on each line; see the docs.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", help="A TOML file with other prompts for agents: see the docs."),
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")]
TopPOption = Annotated[float, typer.Option("--top-p", min=0.01, max=1.0, help="Top-p of sampling.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=1,
        help=f"Most tokens of a message; default {EMBEDDED_TOKENS}, or {CHAT_TOKENS} for other models.",
    ),
]
BudgetOption = Annotated[float, typer.Option("--kv-gib", min=0.01, help="KV memory of an engine, in GiB.")]


def command_of(case: Case, run: Callable[..., None], doc: str, **defaults: Any) -> Callable[..., None]:
    """Return a command with a workflow's own options before those of `run`.

    Args:
        case: The workflow.
        run: Called with the case, its options, and its own keyword arguments.
        doc: The help text.
        defaults: Values that replace defaults of `run`.
    """
    common = list(inspect.signature(run, eval_str=True).parameters.values())[2:]
    # An option that every variant sets would have no effect.
    decided = set.intersection(*(set(variant.changes) for variant in case.variants.values()))
    fields = {name: field for name, field in case.options.model_fields.items() if name not in decided}
    own = [option_of(name, field) for name, field in fields.items()]

    def command(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in fields}
        run(case, lambda: case.options.model_validate(chosen), **values)

    usual = [param.replace(default=defaults.get(param.name, param.default)) for param in common]
    parameters = [*own, *(param.replace(kind=inspect.Parameter.KEYWORD_ONLY) for param in usual)]
    seen_by_typer: Any = command
    seen_by_typer.__signature__ = inspect.Signature(parameters)
    command.__doc__, command.__name__ = doc, case.name
    return command
