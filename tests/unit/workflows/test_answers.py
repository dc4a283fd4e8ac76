"""What a reply answers, whether that is right, and what most say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.workflows.answers import FIRST, LAST, majority, read_answer, states
from choreo_agents.workflows.graphs.tree_of_thoughts import elect


@pytest.mark.parametrize(
    ("reply", "where", "answer"),
    [
        (" Ann has 3. We agree. ", FIRST, "Ann has 3."),
        ("2 plus 3 is 5. The result is 5.", LAST, "The result is 5."),
        ("no full stop", FIRST, "no full stop"),
        ("One. and a rest", LAST, "and a rest"),
        ("", FIRST, ""),
        (" \n", LAST, ""),
        ("So.\nAnswer: 5", "Answer:", "5"),
        ("Answer: 5\nNo, wait.\nanswer:  6 apples \nThank you.", "Answer:", "6 apples"),
        ("**Final ANSWER:** 7**", "Answer:", "** 7**"),
        ("It is 5.\nAnswer:\n8", "Answer:", "8"),
        ("Answer:", "Answer:", "Answer:"),
        ("I think it is\n\n5.\n\n", "Answer:", "5."),
        ("", "Answer:", ""),
        ("(x) 4 and (x) 5", "(x)", "4 and (x) 5"),
    ],
)
def test_the_answer_is_read_where_it_is_said_to_be(reply: str, where: str, answer: str) -> None:
    assert read_answer(reply, where) == answer


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("5", "5"),
        ("The result is 5.", "5"),
        ("** 7**", "7"),
        ("$5.", "5"),
        ("5", "$5"),
        ("it is 5, or so", "5"),
        ("(5)", "5"),
        ("5%", "5"),
        ("x=5", "5"),
        ("10-5=5", "5"),
        ("-5", "-5"),
        ("It is -5.", "-5"),
        ("1.5", "1.5"),
        ("1,000 and more", "1,000"),
        ("RED   kites!", "red kites"),
        ("STRASSE", "straße"),
        ("Ann has 3 red kites.", "Ann has 3 red kites."),
        ("Not 5 but 7.", "7"),
        ("5...", "5"),
        ("a+b", "A+B"),
        ("It is .5", ".5"),
    ],
)
def test_right_answers(answer: str, right: str) -> None:
    assert states(answer, right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("11", "1"),
        ("1", "11"),
        ("21", "1"),
        ("1.5", "1"),
        ("1.5", "5"),
        ("5", ".5"),
        ("-5", "5"),
        ("It is \u22125.", "5"),
        ("5", "-5"),
        ("1,000", "1"),
        ("1,000", "000"),
        ("5x", "5"),
        ("reds", "red"),
        ("infrared", "red"),
        ("", "5"),
        ("5", ""),
        ("", ""),
        (" . ", " . "),
        ("a\\d", "5"),
        ("axb", "a.b"),
    ],
)
def test_wrong_answers(answer: str, right: str) -> None:
    assert not states(answer, right)


@given(st.integers(-200, 200), st.integers(-200, 200))
def test_a_number_states_itself_only(said: int, right: int) -> None:
    for words in (f"{said}", f"The result is {said}.", f"{said}, I think", f"**{said}**"):
        assert states(words, str(right)) == (said == right)


@pytest.mark.parametrize(
    ("answers", "most"),
    [
        (["5", "7", "7"], "7"),
        (["5.", "7", "** 5**", "7"], "5."),
        (["Red Kites", "red  kites.", "blue"], "Red Kites"),
        (["1", "11", "11"], "11"),
        (["5"], "5"),
        ([""], ""),
        ([], ""),
    ],
)
def test_the_majority(answers: list[str], most: str) -> None:
    assert majority(answers) == most


@pytest.mark.parametrize(
    ("votes", "ballots", "answer_prefix", "seats", "elected"),
    [
        (["I vote for B.", "I vote for A. No, I vote for B."], ["A.", "B."], "I vote for", 1, [1]),
        (["Candidate 11."], ["Candidate 1.", "Candidate 11."], "", 1, [1]),
        (["A.", "B."], ["B.", "A."], "", 2, [0, 1]),
        (["5.", "5.", "7."], ["7.", "5.", "5.", None], "", 4, [1, 0, 2, 3]),
        (["7."], [None, "5.", "7."], "", 9, [2, 1, 0]),
        ([], [None, None], "", 1, [0]),
        (["nonsense"], ["A.", "B."], "I vote for", 1, [0]),
    ],
)
def test_an_election(
    votes: list[str], ballots: list[str | None], answer_prefix: str, seats: int, elected: list[int]
) -> None:
    assert elect(votes, ballots, answer_prefix=answer_prefix, seats=seats) == elected
