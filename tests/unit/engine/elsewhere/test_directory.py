"""Who has what, as fronts tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.engine.elsewhere.directory import UNHEARD_S, HandleDirectory


class Clock:
    """Goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> HandleDirectory:
    return HandleDirectory(clock)


def held(directory: HandleDirectory, *ids: str) -> dict[str, list[str]]:
    return {each: list(engines) for each, engines in directory.holders("asks", ids).holders.items()}


def test_fronts_find_what_others_have_had_made(directory: HandleDirectory) -> None:
    directory.report("one", "east", ["a", "b"])
    directory.report("other", "west", ["b"])
    assert held(directory, "a", "b", "c") == {"a": ["east"], "b": ["east", "west"]}
    directory.report("one", "east", [], ["b", "never"])
    assert held(directory, "b") == {"b": ["west"]}
    directory.check()


def test_an_engine_has_it_for_as_long_as_it_has_it_for_one_of_them(directory: HandleDirectory) -> None:
    for _ in range(2):  # saying it twice is saying it once
        directory.report("one", "east", ["a"])
    directory.report("other", "east", ["a"])
    directory.report("one", "east", [], ["a"])
    assert held(directory, "a") == {"a": ["east"]}
    directory.gone("other")
    assert held(directory, "a") == {} and len(directory) == 0


def test_what_was_removed_and_added_is_there(directory: HandleDirectory) -> None:
    directory.report("one", "east", ["a"], ["a"])
    assert held(directory, "a") == {"a": ["east"]}


def test_an_engine_that_is_lost_has_nothing_for_anybody(directory: HandleDirectory) -> None:
    directory.report("one", "east", ["a", "b"])
    directory.report("other", "east", ["a"])
    directory.report("other", "west", ["b"])
    directory.lost("east")
    assert held(directory, "a", "b") == {"b": ["west"]}
    directory.report("one", "east", ["a"])
    assert held(directory, "a") == {"a": ["east"]}, "it is back"
    directory.check()


def test_a_front_notices_that_it_was_forgotten(directory: HandleDirectory, clock: Clock) -> None:
    first = directory.report("one", "east", ["a"])
    clock.now_s += UNHEARD_S
    assert directory.report("one", "east", ["b"]) == first == directory.holders("one", []).incarnation
    clock.now_s += UNHEARD_S + 1
    assert held(directory, "a", "b") == {}, "who asks for them has seen it go"
    again = directory.report("one", "east", ["c"])
    assert again != first
    assert HandleDirectory(clock).report("one", "east", []) not in (first, again), "so it does of a new directory"
    directory.check()


NAMES = st.sampled_from(["a", "b", "c", "d"])
SEVERAL = st.lists(NAMES, max_size=4)
FRONTS, ENGINES = st.sampled_from(["one", "other", "third"]), st.sampled_from(["east", "west"])
STEPS = st.one_of(
    st.tuples(st.just("report"), FRONTS, ENGINES, SEVERAL, SEVERAL),
    st.tuples(st.just("lost"), ENGINES),
    st.tuples(st.just("gone"), FRONTS),
)


@given(st.lists(STEPS, max_size=40))
def test_it_says_what_a_list_of_all_that_was_said_says(steps: Sequence[tuple[Any, ...]]) -> None:
    directory, said = HandleDirectory(Clock()), set[tuple[str, str, str]]()
    for what, *given_ in steps:
        getattr(directory, what)(*given_)
        match what, given_:
            case "report", [front, engine, added, removed]:
                said -= {(front, engine, each) for each in removed}
                said |= {(front, engine, each) for each in added}
            case "lost", [engine]:
                said = {each for each in said if each[1] != engine}
            case "gone", [front]:
                said = {each for each in said if each[0] != front}
        directory.check()
        found = {each: set(engines) for each, engines in directory.holders("asks", "abcd").holders.items()}
        assert found == {each: {e for _, e, m in said if m == each} for each in {m for *_, m in said}}
