"""`choreo models check`: whether a model can be served, and what it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import JsonOption, command_console, named_values, titled, waiting

if TYPE_CHECKING:
    from choreo_agents.models import LoadedModel
    from choreo_agents.models.checking import ModelCheck, ViewComparison

REFUSED = 2
"""Exit code for a model that cannot be served, or whose weights do not fit the free memory."""
_SHOWN = "Ann speaks again"
"""Title of the view that is printed in full: every agent has a message in it."""


@takes_loading
def check(
    model: Annotated[str, typer.Argument(help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name.")],
    chat: Annotated[
        list[str] | None,
        typer.Option(
            "--chat",
            metavar="NAME=VALUE",
            help="A variable of the chat template, such as enable_thinking=true; date=2026-01-31: its date.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Load the weights, if they are available and fit, and measure."),
    ] = True,
    as_json: JsonOption = False,
    loading: Loading = USUAL,
) -> None:
    """Check whether a model can be served exactly, how it sees agents' conversations, and what memory it needs.

    Its configuration and its tokenizer are enough. Views of a conversation between three agents are compared with the
    model's own chat template. If the weights are there, too, its layers are measured, and its logits after moving
    cached keys are compared with the plain model's.

    The exit code is 0 if the model can be served, and 2 if it cannot, also if its weights do not fit the free memory.

    [b]Examples[/b]

      choreo models check embedded
      choreo models check ./Qwen3-0.6B --chat enable_thinking=false --no-measure
      choreo models check Qwen/Qwen3-0.6B --json
    """
    with command_console(as_json=as_json, error_code=REFUSED) as console:
        from choreo_agents.models.checking import check_model

        try:
            chosen = {name: _variable(value) for name, value in named_values("--chat", chat).items()}
            with waiting(console, f"reading the small files of [b]{escape(model)}[/b] ..."):
                report = check_model(model, device=loading.device, dtype=loading.dtype, chat=chosen)
            fits = report.memory.measured and report.memory.holds_weights
            loaded = load(console, model, loading) if measure and fits else None
        except Exception as error:
            if as_json:
                typer.echo(json.dumps({"model": model, "served": False, "why": str(error)}, indent=2))
            raise
        figures = None if loaded is None else measured(loaded)
    if as_json:
        why = {} if report.memory.holds_weights else {"why": "its weights do not fit the free memory"}
        typer.echo(json.dumps(report.as_object() | why | {"measured": figures}, indent=2))
    else:
        report_check(console, report, figures, measure=measure)
    if not report.memory.holds_weights:
        raise typer.Exit(REFUSED)


def _variable(value: str) -> Any:
    """Parse the value of a chat template's variable as JSON; what is no JSON is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def measured(loaded: LoadedModel) -> Mapping[str, Any]:
    """Return what was measured on a loaded model, as plain JSON."""
    from choreo_agents.attention.backends import backend_name, why_not_faster

    probe, attends = loaded.probe, loaded.backend("auto")
    known = {"parameters": loaded.adapter.parameters, "error": probe.error, "rounding": probe.tolerance}
    attending = {"attends": backend_name(attends), "nothing_faster": why_not_faster(attends)}
    return {**known, **attending, "computed_by": loaded.computed_with(attends)}


def report_check(console: Console, report: ModelCheck, figures: Mapping[str, Any] | None, *, measure: bool) -> None:
    """Print a check of a model.

    Args:
        console: Where it is printed.
        report: The check of its configuration and tokenizer.
        figures: What was measured on its weights.
        measure: Whether the user wants them measured.
    """
    name = escape(report.name)
    if figures is not None:
        console.print(f"[green]{name} can be served exactly[/]")
    elif not report.memory.holds_weights:
        console.print(
            f"[red]{name} cannot be served here:[/] its weights do not fit into the free memory of {report.device}"
        )
    else:
        why = "are not downloaded; loading them measures the rest" if measure else "were not measured"
        console.print(f"[green]{name} can be served[/], according to its small files: its weights {why}")
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for row in _facts(report, figures or {}):
        facts.add_row(*row)
    console.print(facts, "")
    same = [view.tokens for view in report.shared] == [view.tokens for view in report.reencoded]
    for comparisons in (report.shared,) if same else (report.shared, report.reencoded):
        [shown] = [comparison for comparison in comparisons if comparison.view.title == _SHOWN]
        console.print(_view(shown))
        if shown.template_text is not None and not shown.equal:
            console.print(f"  [b]The template's own[/], {len(shown.template_tokens or ()):,} tokens:")
            console.print(f"  {_show_ends(shown.template_text)}\n", soft_wrap=True)
    if same:
        console.print("Reencoded edges show the same tokens, encoded again behind what their reader sees.\n")
    if not report.has_template:
        console.print("The tokenizer has no chat template: turns are plain lines, and there is nothing to compare.\n")
        return
    console.print(_comparisons(report.shared if same else (*report.shared, *report.reencoded)))


def _facts(report: ModelCheck, figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    facts, dtype, memory = report.facts, report.dtype, report.memory
    yield "model type", escape(facts.model_type)
    own, served = (str(value).removeprefix("torch.") for value in (dtype.own, dtype.served))
    quantised = "" if dtype.quantised is None else f", quantised with {escape(dtype.quantised)}"
    yield "dtype", f"{served} on {report.device} ({escape(dtype.why)}; stored in {own}{quantised})"
    layers = ", ".join(f"{number} see {far}" for far, number in facts.layers.items())
    yield "context", f"{facts.context:,} tokens; layers: {layers}"
    by = "as stored" if memory.measured else "by the configuration"
    fits = "fits" if memory.holds_context else "does not fit" if memory.holds_weights else "the weights do not fit"
    yield (
        "memory",
        f"weights {decimal(memory.weights)} ({by}); KV {decimal(memory.kv_per_token)} per token, "
        f"{decimal(memory.kv_of_context)} for a whole context: {fits} into {decimal(memory.free)} of free memory",
    )
    for token in facts.stop_tokens:
        note = "part of what closes a turn" if token.closes else "not in any message: it is left out"
        yield "stops at", f"{_show_ends(token.text)} ({token.id}, {' and '.join(token.said_by)}): {note}"
    ends = _show_ends(facts.turn_end) if facts.turn_end else "nothing: the next turn's start ends it"
    yield "an answer ends with", ends
    if figures:
        slower = f" ({escape(figures['nothing_faster'])})" if figures["nothing_faster"] else ""
        yield "attention", f"{figures['attends']}{slower}; the rest computed by {escape(figures['computed_by'])}"
        yield (
            "exactness",
            f"moving cached keys changes logits by at most {figures['error']:.2g}; rounding is up to "
            f"{figures['rounding']:.2g}",
        )


def _view(shown: ViewComparison) -> Table:
    title = f"{shown.view.title}, over {shown.view.edges} edges: {len(shown.tokens):,} tokens"
    rows = [(escape(label), _show_ends(text)) for label, text in shown.messages]
    return titled(title, ("message", "as the model sees it"), rows)


def _comparisons(comparisons: Sequence[ViewComparison]) -> Table:
    rows = []
    for comparison in comparisons:
        view, tokens = comparison.view, comparison.template_tokens
        same = "the template raises" if tokens is None else "[green]yes[/]" if comparison.equal else "no"
        count = "" if tokens is None else f"{len(tokens):,}"
        rows.append((view.title, view.edges, f"{len(comparison.tokens):,}", count, same))
    counts = ("tokens", "template's")
    return titled("Beside the chat template", ("view", "edges", *counts, "the same"), rows, counts)


def _show_ends(text: str) -> str:
    """Return text as markup that shows line ends."""
    return escape(text).replace("\n", "⏎")
