"""Turns a workflow's pydantic options into command-line options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from choreo_agents.workflows.case import CHAT_TOKENS, EMBEDDED_TOKENS, Case, Options
from choreo_agents.workflows.cases.debate import MOST_AGENTS

MakeOptions = Callable[[], Options]
AgentsOption = Annotated[int, typer.Option("--agents", min=2, max=MOST_AGENTS, help="Number of agents in the debate.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Rounds in which each agent answers.")]
InputsOption = Annotated[
    Path | None, typer.Option("--inputs", help="Items of your own, a JSON object on each line; see the docs.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Write each result to this JSONL file at once; a second run continues it."),
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
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print only JSON to stdout: one object; of run --inputs, one per line."),
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
    own = [_parameter(name, field) for name, field in fields.items()]

    def command(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in fields}
        run(case, lambda: case.options.model_validate(chosen), **values)

    usual = [param.replace(default=defaults.get(param.name, param.default)) for param in common]
    parameters = [*own, *(param.replace(kind=inspect.Parameter.KEYWORD_ONLY) for param in usual)]
    seen_by_typer: Any = command
    seen_by_typer.__signature__ = inspect.Signature(parameters)
    command.__doc__, command.__name__ = doc, case.name
    return command


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    least = next((limit.ge for limit in field.metadata if isinstance(limit, Ge)), None)
    most = next((limit.le for limit in field.metadata if isinstance(limit, Le)), None)
    limits: Any = {"min": least, "max": most} if least is not None or most is not None else {}
    help_text = field.description or ""
    if get_origin(field.annotation) is Literal:
        limits["metavar"] = name.upper()  # typer would show all choices here, broken at 80 columns
        help_text = f"{help_text.removesuffix('.')}: {', '.join(get_args(field.annotation))}."
    option = typer.Option(f"--{name.replace('_', '-')}", help=help_text, **limits)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=field.default, annotation=Annotated[field.annotation, option])
