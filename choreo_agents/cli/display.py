"""A debate on the terminal: words as they come, then what they cost."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from choreo_agents.bench.comparison import Comparison
from choreo_agents.bench.debate import Cost, DebateRun
from choreo_agents.engine.methods import MethodName
from choreo_agents.language.scoring import first_sentence
from choreo_agents.language.tasks.debate import DebateProblem

TWINS: tuple[MethodName, ...] = ("baseline", "naive")


class DebateDisplay:
    """One column an agent, one row a round; cells fill while the agents speak."""

    def __init__(self, console: Console, problem: DebateProblem, rounds: int) -> None:
        self._problem = problem
        self._words: dict[str, dict[str, str]] = {agent: {} for agent in problem.agents}
        self._rounds = rounds
        self._live = Live(self._table(), console=console, refresh_per_second=20)

    def __enter__(self) -> DebateDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()  # without a cursor to move, the last frame ends in the middle of a line

    def add(self, agent: str, message_id: str, text: str) -> None:
        """Append a piece of text to an agent's message."""
        if agent in self._words:
            said = self._words[agent]
            said[message_id] = said.get(message_id, "") + text
            self._live.update(self._table())

    def _table(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        table.add_column("round", justify="right", style="dim")
        for agent in self._problem.agents:
            table.add_column(agent, ratio=1, overflow="fold")
        for number in range(self._rounds):
            said = [list(self._words[agent].values()) for agent in self._problem.agents]
            table.add_row(str(number + 1), *(self._cell(words[number : number + 1]) for words in said))
        return table

    def _cell(self, words: list[str]) -> Text:
        if not words:
            return Text("")
        right = first_sentence(words[0]) == self._problem.answer
        done = "." in words[0]
        return Text(words[0].strip(), style="green" if right else "yellow" if done else "")


def opening(problem: DebateProblem, model: str, method: str) -> RenderableType:
    """The question, and what each agent has read."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="bold")
    lines.add_column()
    lines.add_row("asked", Text(problem.question))
    for agent, notes in zip(problem.agents, problem.notes, strict=True):
        lines.add_row(agent, Text(notes, style="dim"))
    return Panel(lines, title=f"a debate on {model}, method {method}", title_align="left", expand=False)


def verdict(run: DebateRun, problem: DebateProblem, method: str) -> Text:
    """The final answer, and whether it is right."""
    mark = ("right", "bold green") if run.correct else (f"wrong: {problem.answer}", "bold red")
    return Text.assemble(f"final answer ({method}): ", (run.answer, "bold"), "  ", mark)


def cost_table(comparison: Comparison) -> RenderableType:
    """Counts and times by method, with what each twin took in units of choreo's."""
    costs = comparison.costs
    table = Table(box=box.SIMPLE_HEAD, title="the baseline's words under three methods", title_justify="left")
    table.add_column("")
    for method in costs:
        table.add_column(method, justify="right")
    table.add_column("baseline/choreo", justify="right", style="bold")
    table.add_column("naive/choreo", justify="right")
    rows: list[tuple[str, Callable[[Cost], float], str]] = [
        ("tokens encoded", lambda cost: cost.tokens_encoded, ",.0f"),
        ("tokens reused", lambda cost: cost.tokens_reused, ",.0f"),
        ("first token, ms", lambda cost: cost.ttft_mean_s * 1e3, ".1f"),
        ("end to end, ms", lambda cost: cost.end_to_end_s * 1e3, ".0f"),
    ]
    for label, figure, style in rows:
        values = {method: figure(cost) for method, cost in costs.items()}
        ratios = [f"{values[twin] / values['choreo']:.2f}x" for twin in TWINS] if label != "tokens reused" else []
        table.add_row(label, *(format(value, style) for value in values.values()), *ratios)
    note = Text(
        "choreo: views of one KV cache. baseline: text with a prefix cache. naive: text without one.\n"
        f"Times are medians of {comparison.repeats} runs of each method, taken in turn on fresh engines; "
        "all decode the same tokens.\nFirst token: mean, from a node's start, encoding of what it reads included.",
        style="dim",
    )
    return Group(table, note)


def cost_object(cost: Cost) -> dict[str, float]:
    """A method's figures as `--json` gives them."""
    return {
        "tokens_encoded": cost.tokens_encoded,
        "tokens_reused": cost.tokens_reused,
        "ttft_mean_s": cost.ttft_mean_s,
        "end_to_end_s": cost.end_to_end_s,
    }
