"""A debate on the terminal: words as they come, then what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from choreo_agents.workflows.comparing import TWINS, Comparison
from choreo_agents.workflows.debating import Debated, DebateRun
from choreo_agents.workflows.running import RunCost


class DebateDisplay:
    """One column an agent, one row a round; cells fill while the agents speak."""

    def __init__(self, console: Console, problem: Debated, rounds: int) -> None:
        self._problem = problem
        self._words: dict[str, dict[str, str]] = {agent: {} for agent in problem.agents}
        self._costs: dict[str, list[str]] = {agent: [] for agent in problem.agents}
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

    def told(self, cost: Mapping[str, Any]) -> None:
        """Note what an agent read for the message that it has just said."""
        if cost["agent"] in self._costs:
            read, encoded = cost["tokens_reused"], cost["tokens_encoded"]
            self._costs[cost["agent"]].append(f"{read:,} read, {encoded:,} encoded")
            self._live.update(self._table())

    def _table(self) -> RenderableType:
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        table.add_column("round", justify="right", style="dim")
        for agent in self._problem.agents:
            table.add_column(agent, ratio=1, overflow="fold")
        for number in range(self._rounds):
            table.add_row(str(number + 1), *(self._cell(agent, number) for agent in self._problem.agents))
        return table

    def _cell(self, agent: str, number: int) -> Text:
        words, costs = list(self._words[agent].values()), self._costs[agent]
        if number >= len(words):
            heard = all(len(done) >= number for done in self._costs.values())
            return Text("reads ..." if heard else "", style="dim")
        right = self._problem.is_correct(words[number])
        over = number < len(costs)
        shown = Text(words[number].strip(), style="green" if right else "yellow" if over else "")
        shown.append(f"\n{costs[number]}" if over else " ...", style="not bold dim default")
        return shown


def opening(problem: Debated, record_tokens: int, model: str, method: str) -> RenderableType:
    """The question, what all agents read, and what each was told alone."""
    lines = Table.grid(padding=(0, 1))
    lines.add_column(style="bold")
    lines.add_column()
    lines.add_row("asked", Text(problem.question))
    if problem.record:
        begins = " ".join(problem.record[0].split()[:14])
        held = f"{len(problem.record)} reports, {record_tokens:,} tokens, read by all: "
        lines.add_row("record", Text.assemble(held, (f"{begins} ...", "dim")))
    for agent, notes in zip(problem.agents, problem.notes, strict=True):
        lines.add_row(agent, Text(notes, style="dim"))
    return Panel(lines, title=f"a debate on {model}, method {method}", title_align="left", expand=False)


def verdict(run: DebateRun, problem: Debated, method: str) -> Text:
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
    rows: list[tuple[str, Callable[[RunCost], float], str]] = [
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


def summary(comparison: Comparison) -> Text:
    """One sentence on what was seen, whichever way it went."""
    cached, plain = (comparison.ratios(twin) for twin in TWINS)
    encoded = _times(cached.tokens_encoded, "fewer", "more", "as many")
    spoke, ended, ended_plain = (
        _times(ratio, "sooner", "later", "as soon") for ratio in (cached.ttft_mean, cached.end_to_end, plain.end_to_end)
    )
    return Text(
        f"Against text with a prefix cache, choreo encoded {encoded} tokens, its agents' first words came {spoke} and "
        f"the whole debate was over {ended}; against text without one it was over {ended_plain}."
    )


def _times(ratio: float, more: str, less: str, same: str) -> str:
    """How many times as much something else took, as a person says it."""
    if f"{max(ratio, 1 / ratio):.2f}" == "1.00":
        return same
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"


def cost_object(cost: RunCost) -> dict[str, float]:
    """A method's figures as `--json` gives them."""
    return {
        "tokens_encoded": cost.tokens_encoded,
        "tokens_reused": cost.tokens_reused,
        "ttft_mean_s": cost.ttft_mean_s,
        "end_to_end_s": cost.end_to_end_s,
    }
