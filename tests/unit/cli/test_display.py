"""A debate on the terminal: who is speaking, what each has read, and the sentence at the end."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from choreo_agents.cli.run_debate import DebateDisplay, summary
from choreo_agents.workflows.comparing import Comparison
from choreo_agents.workflows.debating import problem_of
from choreo_agents.workflows.running import RunCost

COST = RunCost((1.0,), 2.0, tokens_encoded=100, tokens_reused=0, steps=1, rows_per_step=1.0, rows_per_decode_step=1.0)


def shown(display: DebateDisplay) -> str:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(display._table())
    return captured.get()


def test_cells_tell_who_reads_who_speaks_and_what_was_read() -> None:
    display = DebateDisplay(Console(file=io.StringIO(), width=100), problem_of(1, agents=3, reports=9), 2)
    assert shown(display).count("reads ...") == 3, "all of them, in the first round"
    display.add("Alice", "a", "Ann has")
    assert "Ann has ..." in shown(display) and shown(display).count("reads ...") == 2
    display.add("Alice", "a", " 3 red kites.")
    display.told({"agent": "Alice", "tokens_reused": 1900, "tokens_encoded": 10})
    assert "1,900 read, 10 encoded" in shown(display) and "kites. ..." not in shown(display)
    assert shown(display).count("reads ...") == 2, "Alice waits for the others before she reads again"
    for agent in ("Bruno", "Clara"):
        display.add(agent, agent, "Ann has 3 red kites.")
        display.told({"agent": agent, "tokens_reused": 0, "tokens_encoded": 1})
    assert shown(display).count("reads ...") == 3, "all of them, in the second round"
    display.told({"agent": "a stranger", "tokens_reused": 7, "tokens_encoded": 7})
    assert "7 read" not in shown(display)


def test_the_sentence_says_which_way_it_went() -> None:
    slow = replace(COST, tokens_encoded=300, ttft_s=(0.5,), end_to_end_s=1.0)
    costs: Any = {"choreo": COST, "baseline": slow, "naive": replace(COST, end_to_end_s=3.0)}
    words = " ".join(summary(Comparison(costs, baseline=None, repeats=1)).plain.split())  # type: ignore[arg-type]
    assert "encoded 3.00x fewer tokens" in words and "first words came 2.00x later" in words
    assert "the whole debate was over 2.00x later; against text without one it was over 1.50x sooner." in words


def test_what_took_as_long_is_said_to_have_taken_as_long() -> None:
    near = replace(COST, tokens_encoded=50, ttft_s=(1.004,), end_to_end_s=1.992)
    costs: Any = {"choreo": COST, "baseline": near, "naive": COST}
    words = " ".join(summary(Comparison(costs, baseline=None, repeats=1)).plain.split())  # type: ignore[arg-type]
    assert "encoded 2.00x more tokens, its agents' first words came as soon" in words
    assert "the whole debate was over as soon; against text without one it was over as soon." in words
