"""Scorers, by example."""

import pytest
from choreo_bench.language import draw_problem
from choreo_bench.language.problem import Problem, ProblemMessage, siblings
from choreo_bench.language.scoring import (
    AllSentences,
    Coverage,
    EachExact,
    FirstSentence,
    LastSentence,
    Mean,
    OneOf,
    SameItems,
    as_list,
    first_sentence,
    last_sentence,
    listed,
    sentences,
)
from choreo_bench.language.tasks import BranchSolveMerge, Debate

A, B = "Ann has 3 red kites.", "Bob has 5 blue boats."


@pytest.mark.parametrize(
    ("text", "parts"),
    [("", []), (A, [A]), (f"{A} {B}", [A, B]), (f"{A} and", [A, "and"]), (" . ", ["."]), ("no stop", ["no stop"])],
)
def test_a_text_falls_into_sentences(text: str, parts: list[str]) -> None:
    assert sentences(text) == parts
    assert last_sentence(text) == (parts[-1] if parts else "")


@pytest.mark.parametrize(
    ("text", "sentence"), [(f"{A} We all agree.", A), (f"  {A}\n", A), ("no stop", "no stop"), ("", "")]
)
def test_the_first_sentence_ends_with_the_first_full_stop(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.mark.parametrize(
    ("scorer", "said", "score"),
    [
        (FirstSentence("m", A), f"{A} We all agree.", 1.0),
        (FirstSentence("m", A), f"{B} {A}", 0.0),
        (LastSentence("m", A), f"{B} {A}", 1.0),
        (LastSentence("m", A), f"{A} {B}", 0.0),
        (LastSentence("m", A), "", 0.0),
        (OneOf("m", (A, B)), f" {B} ", 1.0),
        (OneOf("m", (A, B)), f"{B} {A}", 1.0),
        (OneOf("m", (A, B)), f"{A} Go on.", 0.0),
        (EachExact((("m", A),)), A, 1.0),
        (EachExact((("m", A),)), f"{A} {B}", 0.0),
        (AllSentences("m", (A, B)), f"{B} {A}", 1.0),
        (AllSentences("m", (A, B)), A, 0.5),
        (AllSentences("m", (A, B)), f"{A} {A}", 0.5),
        (AllSentences("m", (A, B)), f"{A} {B} I guess.", 2 / 3),
        (AllSentences("m", (A,)), "", 0.0),
        (SameItems("m", frozenset({"kites", "boats"}), "We see"), "We see boats and kites.", 1.0),
        (SameItems("m", frozenset({"kites", "boats"}), "We see"), "We see boats.", 0.5),
        (SameItems("m", frozenset({"kites", "boats"}), "We see"), "We see boats, boats and kites.", 2 / 3),
        (SameItems("m", frozenset({"kites", "boats"}), "We see"), "I see boats and kites.", 0.0),
        (SameItems("m", frozenset({"kites", "boats"}), "We see"), "We see boats and kites. Yes.", 0.0),
        (Mean((FirstSentence("m", A), FirstSentence("m", B))), A, 0.5),
    ],
)
def test_answers_are_scored(scorer, said: str, score: float) -> None:
    assert scorer({"m": said}) == pytest.approx(score)


def test_coverage_counts_concepts_in_sentences_that_some_part_said() -> None:
    scorer = Coverage("m", ("a", "b"), frozenset({("Ann", "3 red kites"), ("Bob", "5 blue boats")}))
    parts = {"a": A, "b": B}
    assert scorer(parts | {"m": f"{B} {A}"}) == 1.0
    assert scorer(parts | {"m": A}) == 0.5
    assert scorer(parts | {"m": f"{A} {B} Dan has 2 red hats."}) == 0.5, "a sentence that no part said"
    assert scorer(parts | {"m": f"{A} Bob has 6 blue boats."}) == 0.25, "a changed sentence covers nothing"
    assert scorer(parts | {"m": ""}) == 0.0
    mixed = {"a": "Ann has 5 blue boats.", "b": "Bob has 3 red kites."}
    assert scorer(mixed | {"m": " ".join(mixed.values())}) == 0.0, "the wrong person has it"


def test_lists_read_back_as_they_were_written() -> None:
    for items in (["kites"], ["kites", "boats"], ["kites", "boats", "drums", "bells"]):
        assert listed(f"We see {as_list(items)}.", "We see") == items
    assert listed("", "We see") == listed("We see kites", "We see") == []


def test_siblings_are_neighbours_that_have_not_seen_each_other() -> None:
    messages = (
        ProblemMessage("rules", "system", "Answer."),
        ProblemMessage("notes", "system", A, parents=("rules",)),
        ProblemMessage("q1", "user", "Ann?", parents=("rules", "notes")),
        ProblemMessage("q2", "user", "Bob?", parents=("rules", "notes")),
        ProblemMessage("said", "assistant", A, parents=("rules", "notes", "q1", "q2"), is_answer=True),
    )
    problem = Problem("two", messages, A, FirstSentence("said", A))
    assert siblings(problem, problem.by_name["said"].parents) == [["rules"], ["notes"], ["q1", "q2"]]
    assert siblings(problem, ("q1", "notes", "q2")) == [["q1"], ["notes"], ["q2"]]


def test_agents_with_notes_of_their_own_are_siblings_in_every_round_and_their_notes_are_not() -> None:
    problem = draw_problem(Debate(agents=3, rounds=3), "train", 0)
    one, two, three = problem.messages[2].author or "Alice", "Bruno", "Clara"
    view = problem.by_name[f"{three} 3"].parents
    assert siblings(problem, view) == [
        ["rules"],
        [f"notes {three}"],
        ["question"],
        [f"{three} 1"],
        [f"{three} 2", f"{one} 2", f"{two} 2"],
    ]


def test_branches_that_were_written_apart_are_siblings() -> None:
    problem = draw_problem(BranchSolveMerge(), "train", 0)
    groups = siblings(problem, problem.by_name["merged"].parents)
    assert groups == [["rules"], ["problem"], ["plan"], ["branch 1", "branch 2", "branch 3"], ["ask"]]
