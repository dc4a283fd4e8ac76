"""Tells calls of tools from an answer in a form, where one grammar leads a message to either.

Its words do not show which it is: an answer may look like a call, or quote one. Its tokens do, whether they were
sampled, forced or recalled.
"""

from __future__ import annotations

from collections.abc import Sequence

from choreo_agents.models import MakeGuide
from choreo_agents.sampling import TokenGuide


class CallsOrAnswer:
    """Reads one message token by token, and tells whether it calls or answers; what may be both is taken for calls.

    Args:
        calls: Makes guides to calls alone.
        answer: Makes guides to the answer alone.
        ends: Tokens that end either.
    """

    def __init__(self, calls: MakeGuide, answer: MakeGuide, ends: frozenset[int]) -> None:
        self._calls, self._answer, self._ends = calls, answer, ends
        self._guides = calls(ends), answer(ends)
        self.tokens: list[int] = []
        """All that were taken."""

    def take(self, token: int) -> bool | None:
        """Go on with this token, and tell whether it is an answer; None: nobody can know yet."""
        self.tokens.append(token)
        calls, answers = (_goes_on(guide, token) for guide in self._guides)
        if calls and answers:
            return None
        return answers if calls or answers else self._is_answer(self.tokens[:-1])

    def ended(self) -> bool:
        """Tell whether it is an answer, when nothing follows; one that was cut as both might have been calls."""
        return self._is_answer(self.tokens)

    def _is_answer(self, tokens: Sequence[int]) -> bool:
        return not self._ends_as(self._calls, tokens) and self._ends_as(self._answer, tokens)

    def _ends_as(self, make: MakeGuide, tokens: Sequence[int]) -> bool:
        guide = make(self._ends)
        return all(_goes_on(guide, token) for token in tokens) and (guide.done or _goes_on(guide, min(self._ends)))


def _goes_on(guide: TokenGuide, token: int) -> bool:
    try:
        guide.take(token)
    except ValueError:
        return False
    return True
