"""Workflows on problems of the embedded language: what is drawn, and what is shipped of it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from choreo_bench.cases import CASES, DrawnCase, stakes
from choreo_bench.language.tasks.dilemma import GAME
from choreo_bench.shipped import as_lines, shipped

from choreo_agents.sampling import Sampling
from choreo_agents.workflows import cases
from choreo_agents.workflows.cases import Options
from choreo_agents.workflows.phrasing import load_prompts

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)


def test_a_case_is_the_products_own_but_for_what_is_drawn() -> None:
    assert list(CASES) == list(cases.CASES)
    assert all(isinstance(case, type(cases.CASES[name])) for name, case in CASES.items())


@pytest.mark.parametrize("name", shipped())
def test_the_product_has_problems_that_are_drawn_here(name: str) -> None:
    """Otherwise `python -m choreo_bench.shipped` was not run, or drawing has changed."""
    path = files("choreo_agents.workflows") / "problems" / f"{name}.jsonl"
    assert path.read_text() == as_lines(shipped()[name])


@EVERY_CASE
def test_the_same_number_draws_the_same_item_of_the_split(case: DrawnCase) -> None:
    options = case.options()
    for split in ("train", "dev", "test"):
        drawn = [case.draw(options, split, number) for number in range(4)]
        assert drawn == [case.draw(options, split, number) for number in range(4)]
        assert [item.id for item in drawn] == [f"{split} {number}" for number in range(4)]
        assert len({item.model_dump_json(exclude={"id"}) for item in drawn}) > 1
        assert all(case.item.model_validate_json(item.model_dump_json()) == item for item in drawn)
    contents = {case.draw(options, split, 0).model_dump_json(exclude={"id"}) for split in ("train", "dev", "test")}
    assert len(contents) == 3


def test_no_game_of_the_dilemma_is_in_two_splits() -> None:
    drawn = {split: {stakes(split, number) for number in range(300)} for split in ("train", "dev", "test")}
    assert all(2 <= none < both <= 60 for games in drawn.values() for both, none in games)
    assert len(drawn["train"] | drawn["dev"] | drawn["test"]) == sum(len(games) for games in drawn.values())
    case = CASES["prisoners_dilemma"]
    items: list[Any] = [case.draw(case.options(), "test", number) for number in range(20)]
    told = load_prompts("prisoners_dilemma", "embedded")
    for item in items:
        graph = case.play(item, case.options(), told, Sampling()).graph
        assert graph.system == GAME.format(both=item.both, none=item.none), "a game of the language"


def test_questions_drawn_have_one_plain_sentence_as_their_answer() -> None:
    case = CASES["multi_qa"]
    for number in range(5):
        item: Any = case.draw(case.options(), "test", number)
        assert len(item.questions) == len(item.answers) == 2
        assert all(answer.endswith(".") and answer.count(".") == 1 for answer in item.answers)


@EVERY_CASE
def test_what_the_limits_allow_can_be_drawn(case: DrawnCase) -> None:
    """At the largest that an option can be, or at some large number where there is no limit."""
    for name, field in case.options.model_fields.items():
        if field.annotation is int:
            most = next((limit.le for limit in field.metadata if hasattr(limit, "le")), None)
            least = next(limit.ge for limit in field.metadata if hasattr(limit, "ge"))
            for value in (least, most or 4):
                options: Options = case.options.model_validate({name: value})
                assert case.draw(options, "test", 0).id == "test 0"


def test_questions_in_both_orders_are_the_same_problem_twice() -> None:
    case = CASES["multi_qa"]
    drawn, both = (case.options.model_validate({"both_orders": given}) for given in (False, True))
    for number in range(3):
        one = case.draw(drawn, "train", number)
        first, second = (case.draw(both, "train", 2 * number + place) for place in range(2))
        assert (first.questions, first.answers, first.notes) == (one.questions, one.answers, one.notes)
        assert (second.questions, second.answers) == (one.questions[::-1], one.answers[::-1])
        assert second.notes == one.notes and first.id != second.id
