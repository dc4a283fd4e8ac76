"""Where a model that thinks may go: through its thoughts to an answer."""

from __future__ import annotations

import pytest

from choreo_agents.sampling import BLANK_LINES, AnswerGuide, AnswerPaths, FreeAnswer, Phase, ThoughtsGuide

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


def guide_of(budget: int = 5, close: tuple[int, ...] = (6, CLOSE, AFTER), max_tokens: int = 3) -> ThoughtsGuide:
    return ThoughtsGuide(budget, close, frozenset({END}), ClosedBy(), FreeAnswer(max_tokens, frozenset({END})))


def walk(guide: ThoughtsGuide, *tokens: int) -> tuple[int, ...] | None:
    """What may follow these, none of which is refused."""
    for token in tokens:
        allowed = guide.allowed()
        assert not guide.done and (allowed is None or token in allowed) and not guide.refuses(token)
        guide.take(token)
    return guide.allowed()


def test_a_model_closes_its_thoughts_itself_and_its_answer_ends_at_a_stop_token() -> None:
    guide = guide_of()
    assert walk(guide, 1, 2, CLOSE) == (AFTER,), "what stands before the answer is not its own to say"
    assert walk(guide, AFTER, 3) is None and not guide.done
    walk(guide, END)
    assert guide.done


def test_a_stop_token_while_it_thinks_closes_the_thoughts_and_ends_nothing() -> None:
    guide = guide_of()
    assert walk(guide, 1) is None and guide.refuses(END)
    assert walk(guide, 6) == (CLOSE,) and walk(guide, CLOSE) == (AFTER,)
    assert walk(guide, AFTER) is None and not guide.done, "now it answers"
    walk(guide, 3, END)
    assert guide.done


def test_a_stop_token_that_the_close_begins_with_is_its_first() -> None:
    guide = guide_of(close=(END, CLOSE, AFTER))
    assert walk(guide, 1, END) == (CLOSE,) and not guide.done
    assert walk(guide, CLOSE, AFTER, 3) is None and not guide.done
    walk(guide, END)
    assert guide.done


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_thoughts_end_with_their_budget_and_the_answer_has_its_own(budget: int) -> None:
    guide = guide_of(budget)
    assert walk(guide, *[1] * budget) == (6,)
    walk(guide, 6, CLOSE, AFTER)
    assert walk(guide, 1, 2) is None and not guide.done
    walk(guide, 3)
    assert guide.done and guide.longest == budget + 3 + BLANK_LINES + 3


def test_empty_lines_before_an_answer_are_no_part_of_it_and_end_nothing() -> None:
    told: list[int] = []

    def stops(token: int) -> bool:
        told.append(token)
        return token == BLANK

    guide = ThoughtsGuide(5, (CLOSE, AFTER), frozenset({END}), ClosedBy(), FreeAnswer(2, frozenset({BLANK}), stops))
    walk(guide, 1, CLOSE, AFTER, BLANK, BLANK, 3)
    assert not guide.done and told == [3]
    walk(guide, BLANK)
    assert guide.done and told == [3, BLANK], "behind its first word they are words as any other"


def test_the_answer_may_be_led_like_any_other() -> None:
    paths = AnswerPaths(frozenset({(4, 5)}), frozenset(), frozenset({END}), 5)
    guide = ThoughtsGuide(5, (CLOSE, AFTER), frozenset({END}), ClosedBy(), AnswerGuide(paths))
    assert walk(guide, 4, 1, CLOSE, AFTER) == (4,)
    walk(guide, 4, 5)
    assert guide.done
