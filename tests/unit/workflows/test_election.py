"""Votes are counted, ties go to the first, and seats that nobody won are filled in order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.workflows.graphs.tree_of_thoughts import elect

CASES = {
    "most votes": (["2.", "2.", "1."], ["1.", "2.", "3."], {}, [1]),
    "first of equals": (["2.", "1."], ["3.", "2.", "1."], {}, [1]),
    "no votes": ([], ["1.", "2."], {}, [0]),
    "what comes before the lead is not counted": (["The result is 2. I vote for 1."], ["1.", "2."], {}, [0]),
    "the last lead counts": (["I vote for 1. I vote for 2."], ["1.", "2."], {}, [1]),
    "a vote without the lead is one as a whole": (["2."], ["1.", "2."], {}, [1]),
    "what stands for nobody is dropped": (["7.", "7.", "2."], ["1.", "2."], {}, [1]),
    "a candidate without a ballot": (["None", "2."], [None, "2."], {}, [1]),
    "one ballot, the first of its candidates": (["1.", "1.", "2."], ["2.", "1.", "1."], {"seats": 3}, [1, 0, 2]),
    "two seats": (["3.", "3.", "2."], ["1.", "2.", "3."], {"seats": 2}, [2, 1]),
    "more seats than candidates": (["2."], ["1.", "2."], {"seats": 5}, [1, 0]),
    "those without a ballot come last": (["2."], [None, "1.", "2."], {"seats": 3}, [2, 1, 0]),
    "spaces do not count": ([" 2. "], ["1.", "2. "], {}, [1]),
    "no candidates": (["1."], [], {"seats": 2}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_elected(name: str) -> None:
    votes, ballots, options, elected = CASES[name]
    assert elect(votes, ballots, **({"answer_prefix": "I vote for"} | options)) == elected


def test_without_a_lead_a_vote_is_all_that_is_said() -> None:
    assert elect(["I vote for 2."], ["1.", "2."]) == [0]
    assert elect(["2."], ["1.", "2."]) == [1]


WORDS = st.sampled_from(["1.", "2.", "3.", "Alice."])
ELECTIONS = st.tuples(st.lists(WORDS, max_size=9), st.lists(st.none() | WORDS, max_size=7), st.integers(1, 8))


@given(ELECTIONS)
def test_seats_go_to_different_candidates_by_votes_then_by_place(
    election: tuple[list[str], list[str | None], int],
) -> None:
    votes, ballots, seats = election
    elected = elect([f"I think. I vote for {vote}" for vote in votes], ballots, answer_prefix="I vote for", seats=seats)
    assert len(elected) == min(seats, len(ballots)) == len(set(elected))
    cast, standing = Counter(votes), {}
    for index, ballot in enumerate(ballots):
        if ballot is not None:
            standing.setdefault(ballot, index)
    worth = [cast[b] if b is not None and standing[b] == i else -1 for i, b in enumerate(ballots)]
    for one in range(len(ballots)):
        for other in range(len(ballots)):
            if (worth[one], -one) > (worth[other], -other) and other in elected:
                assert one in elected and elected.index(one) < elected.index(other)


@given(ELECTIONS, st.randoms())
def test_the_order_of_votes_does_not_matter(election: tuple[list[str], list[str | None], int], random: object) -> None:
    votes, ballots, seats = election
    shuffled = [*votes]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert elect(votes, ballots, seats=seats) == elect(shuffled, ballots, seats=seats)
