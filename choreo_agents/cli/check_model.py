"""`choreo models check`: whether a model can be served, how it is fed, and what it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.errors import ChoreoError, InvalidRequestError
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, errors_as_lines
from choreo_agents.terminal.waiting import importing, waiting

if TYPE_CHECKING:
    from choreo_agents.models import LoadedModel

REFUSED = 2
"""Exit code: it cannot be served."""


@takes_loading
def check(
    model: Annotated[str, typer.Argument(help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name.")],
    chat: Annotated[
        list[str] | None,
        typer.Option(
            "--chat",
            metavar="NAME=VALUE",
            help="A variable of the chat template, such as enable_thinking=true; date=2026-01-31: the day it writes.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Load the weights, if they are there and fit, and measure."),
    ] = True,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Say whether a model can be served exactly, how agents' conversations look to it, and what it needs.

    Its configuration and its tokenizer are enough. Three agents settle a question, and what each of them reads stands
    beside what the model's own chat template writes of it. Where the weights are there, too, its layers are measured,
    and its logits compared with the plain model's after moving cached keys.

    Ends with 0 if it can be served, with 2 if it cannot.

    [b]Examples[/b]

      choreo models check embedded
      choreo models check ./Qwen3-0.6B --chat enable_thinking=false --no-measure
      choreo models check Qwen/Qwen3-0.6B --json
    """
    console = Console(stderr=as_json, highlight=False)
    with importing(console):
        from choreo_agents.cli.model_report import report_check, report_measured
        from choreo_agents.models.checking import check_model

    with errors_as_lines(console, code=REFUSED):
        try:
            with waiting(console, f"reading the small files of [b]{escape(model)}[/b] ..."):
                found = check_model(model, device=loading.device, dtype=loading.torch_dtype, chat=variables(chat or ()))
            fits = found.memory.measured and found.memory.holds_weights
            loaded = load(console, model, loading) if measure and fits else None
        except (ChoreoError, OSError, ValueError) as error:
            if as_json:
                typer.echo(json.dumps({"model": model, "served": False, "why": str(error)}, indent=2))
            raise
    if as_json:
        typer.echo(json.dumps(found.as_object() | {"measured": measured(loaded)}, indent=2))
    else:
        report_check(console, found, measured=loaded is not None, wanted=measure)
        if loaded is not None:
            report_measured(console, loaded)


def variables(said: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template, as they are typed; values in JSON are what they say, all else is text."""
    found: dict[str, Any] = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise InvalidRequestError(f"--chat takes NAME=VALUE, such as enable_thinking=true, not {each!r}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def measured(loaded: LoadedModel | None) -> Mapping[str, Any] | None:
    """What was measured, JSON-plain; None if nothing was."""
    if loaded is None:
        return None
    from choreo_agents.attention.backends import backend_name, why_not_faster

    probe = loaded.probe
    attends = loaded.backend("auto")
    computed = {
        "attends": backend_name(attends),
        "nothing_faster": why_not_faster(attends),
        "computed_by": loaded.computed_with(attends),
    }
    return {"parameters": loaded.adapter.parameters, "error": probe.error, "rounding": probe.tolerance, **computed}
