"""Debate problems and the rules by which agents answer."""

from random import Random

import pytest
from choreo_bench.language import vocabulary
from choreo_bench.language.problem import split_of
from choreo_bench.language.scoring import first_sentence
from choreo_bench.language.sentences import (
    UNKNOWN,
    Has,
    draw_facts,
    plurality,
    revise,
    with_wrong_number,
)
from choreo_bench.language.tasks.debate import DEBATE_RULES, debate_problem

A, B, C = "Ann has 3 red kites.", "Ann has 4 red kites.", "Ann has 5 red kites."


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (A, [], A),
        (A, [B, B], B),
        (A, [A, B], A),
        (A, [B], A),
        (B, [A, C], B),
        (A, [B, B, C, C], B),
        (A, [C, C, B, B], C),
        (A, [UNKNOWN, UNKNOWN], A),
        (UNKNOWN, [B, C], B),
        (UNKNOWN, [UNKNOWN, C], C),
        (UNKNOWN, [UNKNOWN], UNKNOWN),
        (None, [B, C, C], C),
        (None, [B, C], B),
        (None, [], UNKNOWN),
    ],
)
def test_the_plurality_breaks_ties_for_ones_own_then_the_first_heard(own, others, chosen: str) -> None:
    assert plurality(own, others) == chosen


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        (A, [A, A], f"{A} We all agree."),
        (A, [], f"{A} We all agree."),
        (A, [A, B], f"{A} I keep my answer."),
        (A, [A, UNKNOWN], f"{A} I keep my answer."),
        (A, [B, B], f"{B} I change my answer."),
        (UNKNOWN, [B], f"{B} I change my answer."),
        (UNKNOWN, [UNKNOWN], UNKNOWN),
    ],
)
def test_a_later_round_says_how_the_choice_compares_with_ones_own(own: str, others: list[str], said: str) -> None:
    assert revise(own, others) == said


@pytest.mark.parametrize(
    ("text", "sentence"), [(f"{A} We all agree.", A), (f"  {A}\n", A), ("no stop", "no stop"), ("", "")]
)
def test_the_first_sentence_ends_with_the_first_full_stop(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_a_wrong_number_changes_nothing_but_the_number() -> None:
    fact = Has("Ann", "3", "red", "kites")
    wrong = {with_wrong_number(Random(seed), fact) for seed in range(500)}
    assert {int(w.number) for w in wrong} == set(range(2, 21)) - {3}
    assert {(w.person, w.color, w.objects) for w in wrong} == {("Ann", "red", "kites")}


def test_facts_are_about_different_people() -> None:
    facts = draw_facts(Random(0), len(vocabulary.PEOPLE))
    assert {fact.person for fact in facts} == set(vocabulary.PEOPLE)


def test_the_same_seed_draws_the_same_problem_and_others_do_not() -> None:
    assert debate_problem(7) == debate_problem(7)
    assert len({debate_problem(seed) for seed in range(20)}) == 20


@pytest.mark.parametrize("agents", [-1, 0, 1, 9])
def test_an_impossible_number_of_agents_is_refused(agents: int) -> None:
    with pytest.raises(ValueError, match=f"between 2 and 8, not {agents}"):
        debate_problem(0, agents=agents)


@pytest.mark.parametrize("wrong", [{"wrong": 4}, {"wrong": -1}, {"facts": 65}, {"facts": 0}], ids=str)
def test_numbers_that_cannot_be_drawn_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises((ValueError, IndexError)):
        debate_problem(0, **wrong)


def test_a_debate_belongs_to_the_split_that_is_asked_for() -> None:
    for split in ("train", "dev", "test"):
        made = debate_problem(5, split=split)
        assert split_of([DEBATE_RULES, made.question, *made.notes]) == split
