"""What a run cost under three methods: a table, and three sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from choreo_agents.workflows.running import RunCost

Costs = Mapping[str, "RunCost"]
"""By method."""
_FIGURES: Mapping[str, tuple[str, Callable[[RunCost], float], float, str]] = {
    "tokens_encoded": ("tokens encoded", lambda cost: cost.tokens_encoded, 1, ",.0f"),
    "tokens_reused": ("tokens reused", lambda cost: cost.tokens_reused, 1, ",.0f"),
    "ttft_mean_s": ("first token, ms", lambda cost: cost.ttft_mean_s, 1e3, ".1f"),
    "end_to_end_s": ("end to end, ms", lambda cost: cost.end_to_end_s, 1e3, ".0f"),
}
"""By their names in `--json`: what they are called, and how they are written."""


def ratio(costs: Costs, twin: str, figure: str) -> float:
    """What a method took in units of what choreo took."""
    _, value, _, _ = _FIGURES[figure]
    return value(costs[twin]) / value(costs["choreo"])


def costs_told(costs: Costs, repeats: int, what: str) -> RenderableType:
    """Counts and times by method, with what each twin took in units of choreo's, and what that says of a `debate`."""
    twins = [method for method in costs if repeats and method != "choreo"]
    title = "the baseline's words under three methods" if repeats else "what it took"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("")
    for name in [*costs, *(f"{twin}/choreo" for twin in twins)]:
        table.add_column(name, justify="right", style="bold" if name == "baseline/choreo" else "")
    for figure, (label, value, scale, style) in _FIGURES.items():
        ratios = [f"{ratio(costs, twin, figure):.2f}x" for twin in twins if figure != "tokens_reused"]
        table.add_row(label, *(format(value(cost) * scale, style) for cost in costs.values()), *ratios)
    note = Text(
        "choreo: views of one KV cache. baseline: text with a prefix cache. naive: text without one.\n"
        f"Times are medians of {repeats} runs of each method, taken in turn on fresh engines; "
        "all decode the same tokens.\nFirst token: mean, from a node's start, encoding of what it reads included.",
        style="dim",
    )
    if not repeats:
        return Group("", table)
    return Group("", table, note, "", summary(costs, what))


def summary(costs: Costs, what: str) -> Text:
    """Three sentences on what was seen of a `debate`, whichever way it went."""
    words = {"tokens_encoded": ("fewer", "more", "as many"), "ttft_mean_s": ("sooner", "later", "as soon")}
    (encoded, spoke, ended), (_, _, ended_plain) = (
        [_times(ratio(costs, twin, figure), *words.get(figure, words["ttft_mean_s"])) for figure in _TOLD]
        for twin in ("baseline", "naive")
    )
    return Text(
        f"Against text with a prefix cache, choreo encoded {encoded} tokens. Its agents' first words came {spoke}, and "
        f"the whole {what} was over {ended}. Against text without one it was over {ended_plain}."
    )


def as_object(costs: Costs) -> dict[str, Any]:
    """The same, as JSON."""
    twins = [twin for twin in costs if "choreo" in costs and twin != "choreo"]
    return {
        "methods": {name: {each: getattr(cost, each) for each in _FIGURES} for name, cost in costs.items()},
        "ratios": {twin: {each.removesuffix("_s"): ratio(costs, twin, each) for each in _TOLD} for twin in twins},
    }


_TOLD = ("tokens_encoded", "ttft_mean_s", "end_to_end_s")


def _times(ratio: float, more: str, less: str, same: str) -> str:
    """How many times as much something else took, as a person says it."""
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"
