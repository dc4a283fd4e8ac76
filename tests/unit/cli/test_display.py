"""Workflows on the terminal: who speaks, what each has read, how votes went, and the sentences at the end."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from support.debates import debate_setting

from choreo_agents.cli.compare import summary, table_of
from choreo_agents.cli.displays import DISPLAYS, PlayDisplay
from choreo_agents.graph.comparing import ComparedInput, Comparison, Cost
from choreo_agents.testing import Script, ScriptedCall
from choreo_agents.workflows.cases import CASES
from choreo_agents.workflows.playing import Setting, make_setup, run_method

COST = Cost(tokens_encoded=100, tokens_reused=0, first_token_s=1.0, end_to_end_s=2.0, steps=1)


def printed(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def display_of(setting: Setting) -> PlayDisplay:
    name = setting.setup.case.name
    return DISPLAYS.get(name, PlayDisplay)(Console(file=io.StringIO(), width=100), setting)


def played(display: PlayDisplay) -> None:
    with display:
        run_method(display.setting, "choreo", on_token=display.add, on_decode=display.add_cost)


def told(agent: str, words: str, read: int, encoded: int) -> dict[str, Any]:
    return {"agent": agent, "words": words, "tokens_reused": read, "tokens_encoded": encoded}


def test_cells_tell_who_reads_who_speaks_and_what_was_read() -> None:
    display = display_of(debate_setting(Script().model, 1))
    assert printed(display.render()).count("reads ...") == 3, "all of them, in the first round"
    display.add("Alice", "a", "Ann has", (1, 0))
    assert "Ann has" in printed(display.render()) and printed(display.render()).count("reads ...") == 2
    display.add("Alice", "a", " 3 red kites.", (1, 0))
    display.add_cost(told("Alice", "Ann has 3 red kites.", 1900, 10))
    assert "1,900 read, 10 encoded" in printed(display.render())
    assert printed(display.render()).count("reads ...") == 2, "Alice waits for the others before she reads again"
    for agent in ("Bruno", "Clara"):
        display.add(agent, agent, "Ann has 3 red kites.", (1, 0))
        display.add_cost(told(agent, "Ann has 3 red kites.", 0, 1))
    assert printed(display.render()).count("reads ...") == 3, "all of them, in the second round"
    display.add_cost(told("a stranger", "", 7, 7))
    assert "7 read" not in printed(display.render())


@pytest.mark.parametrize("number", range(20))
def test_a_debate_says_who_is_wrong_on_purpose(number: int) -> None:
    setting = debate_setting(Script().model, number)
    [wrong] = setting.item.mistaken
    name = setting.setup.prompts.names("agents")[wrong]
    opening = printed(display_of(setting).opening("embedded", "choreo"))
    assert f"The notes of {name} are wrong on purpose: see which agent convinces the others." in opening


def tree(script: Script, **options: int) -> Setting:
    case: Any = CASES["tree_of_thoughts"]
    setup = make_setup(case, case.options(**options), script.model, None, 1.0, 1.0, 64)
    return Setting(script.model, setup, case.item(question="What is 2 plus 3?", answer="5"))


def thought(call: ScriptedCall) -> str:
    """What a candidate says by its name: the second one is wrong, and on a second level all are right."""
    wrong = "Candidate 2" in call.header
    return f"I am sure.\nAnswer: {7 if wrong else 5}"


def test_a_tree_is_drawn_with_its_votes_and_the_winner() -> None:
    votes = iter(["Candidate 3.", "Candidate 2.", "Candidate 3."])
    script = Script(
        {"thinker": thought, "voter": lambda _: f"Well. I vote for {next(votes)}", "finalist": "So.\nAnswer: 5"}
    )
    display: Any = display_of(tree(script, branches=3, voters=3))
    assert "level 1" not in printed(display.render()), "nobody has said a word"
    played(display)
    words = printed(display.render())
    candidates = re.findall(r"(Candidate \d)( {2}goes on)?  ([\d,]+) read, ([\d,]+) encoded", words)
    assert [(name, bool(won)) for name, won, *_ in candidates] == [
        ("Candidate 1", False),
        ("Candidate 2", False),
        ("Candidate 3", True),
    ]
    assert sum(int(read) for *_, read, _ in candidates) > 0
    assert "votes: 2 for Candidate 3, 1 for Candidate 2" in words
    assert all(f"Voter {number} " in words for number in (1, 2, 3))
    assert "Assistant, who reads Candidate 3's thought" in words and words.index("votes:") < words.index("Assistant")
    scores = [(each["node"], each["score"]) for each in display.messages()]
    assert scores[:3] == [("thinker", 1.0), ("thinker", 0.0), ("thinker", 1.0)] and scores[-1] == ("finalist", 1.0)
    assert all(each["tokens_encoded"] > 0 for each in display.messages())


def test_every_level_of_a_tree_has_its_own_candidates() -> None:
    script = Script(
        {"thinker": thought, "voter": lambda call: f"I vote for {call.sampling.choices[-1]}", "finalist": "Answer: 5"}
    )
    display: Any = display_of(tree(script, branches=2, voters=2, depth=2))
    played(display)
    first, second = printed(display.render()).split("level 2")
    assert re.findall(r"(Candidate \d)( {2}goes on)?  [\d,]+ read", first) == [
        ("Candidate 1", ""),
        ("Candidate 2", "  goes on"),
    ]
    assert re.findall(r"(Candidate \d)( {2}goes on)?  [\d,]+ read", second) == [
        ("Candidate 3", ""),
        ("Candidate 4", "  goes on"),
    ]
    assert "who reads Candidate 4's thought" in second


def test_messages_with_the_same_words_have_each_its_cost() -> None:
    display = display_of(tree(Script(), branches=2, voters=1))
    for number in range(2):
        display.add("thinker", str(number), "Answer: 5", (2, number))
    display.add_cost(told("thinker", "Answer: 5", 0, 9))
    assert [each.get("tokens_encoded") for each in display.messages()] == [9, None]
    display.add_cost(told("thinker", "Answer: 5", 4, 5))
    assert [each["tokens_encoded"] for each in display.messages()] == [9, 5]


def found_of(**costs: Cost) -> Comparison:
    return Comparison(tuple(costs), (ComparedInput(costs, {}, {}),), repeats=5)


def test_the_sentences_say_which_way_it_went() -> None:
    slow = replace(COST, tokens_encoded=300, first_token_s=0.5, end_to_end_s=1.0)
    found = found_of(choreo=COST, baseline=slow, naive=replace(COST, end_to_end_s=3.0))
    words = " ".join(summary(found, "tree").plain.split())
    assert words.count(". ") + words.endswith(".") == 3
    assert "encoded 3.00x fewer tokens" in words and "first tokens came 2.00x later" in words
    assert "the whole tree ended 2.00x later. Against text without one it ended 1.50x sooner." in words


def test_what_took_as_long_is_said_to_have_taken_as_long() -> None:
    near = replace(COST, tokens_encoded=50, first_token_s=1.004, end_to_end_s=1.992)
    words = " ".join(summary(found_of(choreo=COST, baseline=near, naive=COST), "debate").plain.split())
    assert "encoded 2.00x more tokens. Its agents' first tokens came as soon" in words
    assert "the whole debate ended as soon. Against text without one it ended as soon." in words


def test_a_table_has_a_column_for_each_method_and_for_each_ratio() -> None:
    words = printed(table_of(found_of(choreo=COST, baseline=replace(COST, tokens_encoded=250), naive=COST), "costs"))
    assert "baseline/choreo" in words and "naive/choreo" in words
    assert re.search(r"tokens encoded +100 +250 +100 +2.50x +1.00x", words)
