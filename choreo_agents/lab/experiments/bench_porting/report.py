"""What was measured, as a table, and what porting changes in lines."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from choreo_agents.lab.experiments.bench_porting.measure import Way, WayFigures
from choreo_agents.lab.experiments.bench_porting.ported_team import team as ported_team
from choreo_agents.lab.rivals.stock_team import team as stock_team

COLUMNS = ("", "lines new", "gone", "tokens encoded", "reused", "first token, ms", "sooner", "end to end, s", "shorter")
MADE: Mapping[Way, str] = {
    "ChatHuggingFace": 'chat = ChatHuggingFace(llm=HuggingFacePipeline.from_model_id(PATH, task="text-generation"))',
    "ChatChoreo": "chat = ChatChoreo(model=PATH)",
    "our nodes": "engine = Engine.load(PATH)",
}
"""The line that loads the model."""


@dataclass(frozen=True)
class LinesChanged:
    """Between a program and the stock one, without imports, docstrings and empty lines."""

    new: int
    gone: int


def lines_changed(way: Way) -> LinesChanged:
    """What a way has changed: the line that loads the model, and its graph if that is another."""
    lines = difflib.ndiff(_code("ChatHuggingFace"), _code(way))
    marks = [line[0] for line in lines]
    return LinesChanged(marks.count("+"), marks.count("-"))


_GRAPHS: Mapping[Way, Any] = {"ChatHuggingFace": stock_team, "ChatChoreo": stock_team, "our nodes": ported_team}


def _code(way: Way) -> list[str]:
    lines = [line.strip() for line in inspect.getsource(_GRAPHS[way]).splitlines()]
    return [MADE[way], *(line for line in lines if line and not line.startswith('"""'))]


def rows(found: Sequence[WayFigures]) -> list[tuple[str, ...]]:
    """The table's cells: times beside those of the first way."""
    made: list[tuple[str, ...]] = []
    for each in found:
        lines = lines_changed(each.way)
        sooner, shorter = f"{found[0].ttft_s / each.ttft_s:.1f}x", f"{found[0].end_to_end_s / each.end_to_end_s:.2f}x"
        counts = (f"{number:,}" for number in (each.tokens_encoded, each.tokens_reused))
        times = f"{1000 * each.ttft_s:,.0f}", sooner, f"{each.end_to_end_s:,.2f}", shorter
        made.append((each.way, str(lines.new), str(lines.gone), *counts, *times))
    return made


def title(settings: Mapping[str, Any]) -> str:
    """What the table is of."""
    told = {"turns": "turns", "system": "system prompt", "task": "question", "utterance": "answer"}
    lengths = ", ".join(f"{what} {settings[name]}" for name, what in told.items())
    versions = ", ".join(f"{name} {settings[name]}" for name in ("torch", "transformers", "langgraph"))
    return (
        f"{settings['model']}, {settings['dtype']}, {settings['device']}, {settings['threads']} thread(s); {lengths} "
        f"(tokens); {settings['calls']} calls, medians of {settings['runs']} runs; {versions}"
    )


def as_object(found: Sequence[WayFigures], settings: Mapping[str, Any]) -> dict[str, Any]:
    """In JSON's types."""
    return {"settings": dict(settings), "ways": [asdict(each) | asdict(lines_changed(each.way)) for each in found]}


def as_markdown(found: Sequence[WayFigures], settings: Mapping[str, Any], command: str) -> str:
    """The table, with the command that makes it again."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|"]
    body = [f"| {' | '.join(row)} |" for row in rows(found)]
    return "\n".join([f"`{command}`", "", f"{title(settings)}.", "", *head, *body, ""])
