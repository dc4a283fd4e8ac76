"""A workflow on the terminal: who says what, as it is said."""

from __future__ import annotations

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from choreo_agents.workflows.case import Case, Item, Result
from choreo_agents.workflows.playing import item_words
from choreo_agents.workflows.running import RunCost


class PlayDisplay:
    """One row a message, in the order in which their first words came; rows fill side by side."""

    def __init__(self, console: Console) -> None:
        self._nodes: dict[str, str] = {}
        self._words: dict[str, str] = {}
        self._live = Live(self._table(), console=console, refresh_per_second=20, vertical_overflow="visible")

    def __enter__(self) -> PlayDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()  # without a cursor to move, the last frame ends in the middle of a line

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
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="bold")
    lines.add_column()
    for name, words in item_words(item):
        if name not in ("answer", "answers", "concepts"):
            lines.add_row(name, Text(words))
    title = f"{case.name.replace('_', ' ')} on {escape(model)}, {variant}"
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
