"""Programs of LangGraph's documentation, ported: who sees what, what was changed, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from integration.langgraph_docs.porting import HERE, PAGE, changes, encoded, page, ported, program, stock_views
from integration.langgraph_docs.programs import PROGRAMS, Once
from support.ported_views import ROWS, Heard, View, differences, matched

from choreo_agents import compare
from choreo_agents.testing import Script

TUTORIAL = Path(__file__).parents[3] / "docs/tutorials/port-a-graph.md"

by_name = pytest.mark.parametrize("name", PROGRAMS)


def test_there_are_twelve_and_both_files_of_each() -> None:
    for kind in ("stock", "ported"):
        assert {path.stem for path in (HERE / kind).glob("*.py")} == set(PROGRAMS)
    assert len(PROGRAMS) == 12


@by_name
def test_every_call_sees_what_the_stock_program_sends(name: str) -> None:
    found: set[str] = set()
    for stock, seen in matched(stock_views(name), ported(name)[0]):
        rows, other = differences(stock, seen)
        assert other == [], f"in {stock.agent}'s call that says {stock.said!r}"
        found |= rows
    assert found == set(PROGRAMS[name].differs), "what is declared is what differs"


def test_what_views_may_differ_in_is_in_the_porting_table() -> None:
    page = TUTORIAL.read_text()
    for row in ROWS.values():
        assert f"\n| **{row}**" in page, row


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda heard: heard[:-1], "does not see"),
        (lambda heard: [heard[0], heard[2], heard[1], *heard[3:]], "sees"),
        (lambda heard: [*heard[:-1], replace(heard[-1], words="Else.")], "Else."),
        (lambda heard: [*heard[:-1], replace(heard[-1], speaker="bob")], "bob"),
        (lambda heard: [*heard, Heard("assistant", "bob", "More.")], "More."),
        (lambda heard: [replace(heard[0], tools=("find",)), *heard[1:]], "find"),
    ],
    ids=["less", "another order", "other words", "another speaker", "more", "other tools"],
)
def test_a_view_that_differs_otherwise_is_told(changed: object, told: str) -> None:
    assert callable(changed)
    stock = View("ann", "Yes.", tuple(Heard("user", None, words) for words in ("One.", "Two.", "Three.")))
    assert differences(stock, stock) == (set(), [])
    rows, other = differences(stock, replace(stock, heard=tuple(changed(list(stock.heard)))))
    assert rows == set() and any(told in each for each in other)


@by_name
def test_at_most_one_line_of_a_node_is_to_be_written_to_share(name: str) -> None:
    """And a line each for the state, for what takes the engine, and twice for every graph; no other one."""
    made = changes(name)
    assert len(made.nodes) <= len(PROGRAMS[name].lines)
    source = (HERE / "ported" / f"{name}.py").read_text()
    assert len(made.graphs) <= 2 + 2 * source.count(" = ChoreoGraph(") + source.count(" = team(")
    # A route is its signature and what it returns; what a function hands on to another graph is one line for each.
    assert len(made.functions) <= 2 * source.count("on_output=") + 2 * source.count("def handed") + source.count(
        "handed(s"
    )
    assert sum(map(len, (made.nodes, made.functions, made.graphs))) < made.gone


@by_name
def test_no_more_is_encoded_than_before(name: str) -> None:
    encoded_now = ported(name)[1]
    assert encoded_now <= encoded(name, "naive")
    if name != "long_term_memory":  # threads that share the first words of a system prompt, and no message
        assert encoded_now <= encoded(name, "baseline")


@pytest.mark.parametrize("name", [name for name, one in PROGRAMS.items() if isinstance(one.run, Once)])
def test_a_comparison_counts_what_separate_runs_encode(name: str) -> None:
    asked = PROGRAMS[name].run
    assert isinstance(asked, Once)
    # A list is what a node says in one run; each way has a run of its own that decodes freely.
    lines = {node: [*said] * 2 if isinstance(said, list) else said for node, said in PROGRAMS[name].lines.items()}
    with Script(lines).load() as engine:
        found = compare(program("ported", name)(engine), [asked.words], repeats=1)
    counted = {way: found.cost(way).tokens_encoded for way in found.ways}
    assert counted == {
        "choreo": ported(name)[1],
        "baseline": encoded(name, "baseline"),
        "naive": encoded(name, "naive"),
    }


def test_the_page_says_what_was_counted() -> None:
    assert PAGE.read_text() == page(), "write it again, by the command that it names"
