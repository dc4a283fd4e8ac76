"""Where a model that thinks may go: through its thoughts to an answer."""

from __future__ import annotations

import pytest

from choreo_agents.sampling import BLANK_LINES, AnswerPaths, ChoiceConstraint, FreeAnswer, Phase, ThinkingConstraint

CLOSE, AFTER, END, BLANK = 7, 8, 9, 0


class ClosedBy:
    """Thoughts end with one token, and a lead stands between it and the answer."""

    def __init__(self) -> None:
        self.rest: tuple[int, ...] = ()
        self._phase: Phase = "thoughts"

    def add(self, token: int) -> Phase:
        if self._phase == "thoughts" and token == CLOSE:
            self._phase, self.rest = "close", (AFTER,)
        elif self._phase == "close" and self.rest:
            self.rest = ()
        elif self._phase == "close" and token != BLANK:
            self._phase = "answer"
        return self._phase


def constraint_of(
    budget: int = 5, close: tuple[int, ...] = (6, CLOSE, AFTER), max_tokens: int = 3
) -> ThinkingConstraint:
    return ThinkingConstraint(budget, close, frozenset({END}), ClosedBy(), FreeAnswer(max_tokens, frozenset({END})))


def walk(constraint: ThinkingConstraint, *tokens: int) -> tuple[int, ...] | None:
    """What may follow these, none of which is refused."""
    for token in tokens:
        allowed = constraint.allowed()
        assert not constraint.done and (allowed is None or token in allowed) and not constraint.refuses(token)
        constraint.take(token)
    return constraint.allowed()


def test_a_model_closes_its_thoughts_itself_and_its_answer_ends_at_a_stop_token() -> None:
    constraint = constraint_of()
    assert walk(constraint, 1, 2, CLOSE) == (AFTER,), "what stands before the answer is not its own to say"
    assert walk(constraint, AFTER, 3) is None and not constraint.done
    walk(constraint, END)
    assert constraint.done


def test_a_stop_token_while_it_thinks_closes_the_thoughts_and_ends_nothing() -> None:
    constraint = constraint_of()
    assert walk(constraint, 1) is None and constraint.refuses(END)
    assert walk(constraint, 6) == (CLOSE,) and walk(constraint, CLOSE) == (AFTER,)
    assert walk(constraint, AFTER) is None and not constraint.done, "now it answers"
    walk(constraint, 3, END)
    assert constraint.done


def test_a_stop_token_that_the_close_begins_with_is_its_first() -> None:
    constraint = constraint_of(close=(END, CLOSE, AFTER))
    assert walk(constraint, 1, END) == (CLOSE,) and not constraint.done
    assert walk(constraint, CLOSE, AFTER, 3) is None and not constraint.done
    walk(constraint, END)
    assert constraint.done


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_thoughts_end_with_their_budget_and_the_answer_has_its_own(budget: int) -> None:
    constraint = constraint_of(budget)
    assert walk(constraint, *[1] * budget) == (6,)
    walk(constraint, 6, CLOSE, AFTER)
    assert walk(constraint, 1, 2) is None and not constraint.done
    walk(constraint, 3)
    assert constraint.done and constraint.longest == budget + 3 + BLANK_LINES + 3


def test_empty_lines_before_an_answer_are_no_part_of_it_and_end_nothing() -> None:
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return token == BLANK

    constraint = ThinkingConstraint(
        5, (CLOSE, AFTER), frozenset({END}), ClosedBy(), FreeAnswer(2, frozenset({BLANK}), stops)
    )
    walk(constraint, 1, CLOSE, AFTER, BLANK, BLANK, 3)
    assert not constraint.done and told == [3]
    walk(constraint, BLANK)
    assert constraint.done and told == [3, BLANK], "behind its first word they are words as any other"


def test_the_answer_may_be_led_like_any_other() -> None:
    paths = AnswerPaths(frozenset({(4, 5)}), frozenset(), frozenset({END}), 5)
    constraint = ThinkingConstraint(5, (CLOSE, AFTER), frozenset({END}), ClosedBy(), ChoiceConstraint(paths))
    assert walk(constraint, 4, 1, CLOSE, AFTER) == (4,)
    walk(constraint, 4, 5)
    assert constraint.done
