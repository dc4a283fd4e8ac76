"""A comparison's figures on the terminal: a table, three sentences, and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from choreo_agents.terminal.options import titled

if TYPE_CHECKING:
    from choreo_agents.graph.comparing import Comparison, Figure

_TOLD: tuple[Figure, ...] = ("tokens_encoded", "first_token_s", "end_to_end_s")


def table_of(found: Comparison, title: str) -> RenderableType:
    """Return counts and times of each method, how many times as much as choreo the others took, and what that means."""
    table = titled(title, found.columns, found.columns[1:])
    for column in table.columns:
        column.style = "bold" if column.header == "baseline/choreo" else ""
    for row in found.rows():
        table.add_row(*row)
    note = (
        "choreo: from the cache. baseline: text with a prefix cache. naive: text without one. All are forced to the "
        f"same tokens; times are medians ({found.repeats} of each, in turn, on fresh engines), without functions and "
        "tools. First token: mean, from a node's start, encoding of what it reads included."
    )
    return Group(table, Text(note, style="dim"))


def summary(found: Comparison, what: str) -> Text:
    """Return three sentences on what was seen of a `debate`, whichever way it went."""
    words = {"tokens_encoded": ("fewer", "more", "as many")}
    (encoded, spoke, ended), (_, _, ended_plain) = (
        [_times(found.ratio(twin, figure), *words.get(figure, ("sooner", "later", "as soon"))) for figure in _TOLD]
        for twin in ("baseline", "naive")
    )
    return Text(
        f"Against text with a prefix cache, choreo encoded {encoded} tokens. Its agents' first words came {spoke}, and "
        f"the whole {what} was over {ended}. Against text without one it was over {ended_plain}."
    )


def as_object(found: Comparison) -> dict[str, Any]:
    """Return costs by method, and the others' over choreo's, as JSON."""
    return {
        "methods": {way: asdict(found.cost(way)) for way in found.ways},
        "ratios": {way: {figure: found.ratio(way, figure) for figure in _TOLD} for way in found.ways[1:]},
    }


def _times(ratio: float, more: str, less: str, same: str) -> str:
    """How many times as much something else took, as a person says it."""
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"
