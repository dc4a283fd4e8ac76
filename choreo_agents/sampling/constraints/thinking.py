"""Which tokens may come next where a model thinks before it answers."""

from __future__ import annotations

from typing import Literal, Protocol

from choreo_agents.sampling.constraints.base import Allowed, AnswerConstraint, FreeAnswer, TokenConstraint

Phase = Literal["thoughts", "close", "answer"]
BLANK_LINES = 2
"""Tokens of empty lines that may stand before an answer's first word and are no part of it."""


class Phases(Protocol):
    """Tells of each token whether it is thought, said, or stands in between."""

    def add(self, token: int) -> Phase:
        """The phase of the next token."""
        ...

    @property
    def rest(self) -> tuple[int, ...]:
        """What is still to come before the answer, once the thoughts are over; empty before."""
        ...


class ThinkingConstraint(AnswerConstraint):
    """Lets a model think for so many tokens, has it close its thoughts, and lets it answer.

        sampled    thoughts . . . . . | close . | answer . . . | end

    The model closes its thoughts itself, or is made to: where it would end the message instead, or has thought for as
    long as it may. Empty lines before the first word of an answer that nothing leads are no part of it and end nothing.

    Args:
        budget: Tokens of thoughts at most; 0: none.
        close: What stands between thoughts and answer.
        ends: Tokens that end a message.
        phases: Watches the tokens.
        answer: Leads the answer.
        total: Tokens of both at most, less those that it is made to say; None: as many as either may have.
    """

    def __init__(
        self,
        budget: int,
        close: tuple[int, ...],
        ends: frozenset[int],
        phases: Phases,
        answer: AnswerConstraint,
        total: int | None = None,
    ) -> None:
        self.longest = (0 if total else budget) + len(close) + BLANK_LINES + answer.longest
        self._budget, self._close, self._ends = budget, close, ends
        self._phases = phases
        self._answer, self._total = answer, total
        self._forced = close if budget == 0 else ()
        """What is left of what must come next."""
        self._phase: Phase = "thoughts"
        self._sampled = 0

    @property
    def answers(self) -> bool:
        """Whether the thoughts are over and closed: what comes next is the answer's."""
        return self._phase == "answer"

    @property
    def leader(self) -> TokenConstraint:
        """See `AnswerConstraint`."""
        return self._answer.leader if self._phase == "answer" else self

    def allowed(self) -> Allowed:
        """What may come next."""
        if self._phase == "answer":
            return self._answer.allowed()
        return self._forced[:1] or None

    def permits(self, token: int) -> bool:
        """See `AnswerConstraint`."""
        return self._answer.permits(token) if self._phase == "answer" else super().permits(token)

    def refuses(self, token: int) -> bool:
        """Whether the model wanted to end before it has answered, or as the answer's own constraint has it."""
        if self._phase == "answer":
            return self._answer.refuses(token)
        if self._forced or token not in self._ends or token == self._close[0]:
            return False
        self._forced = self._close
        return True

    def take(self, token: int) -> None:
        """Go on with this token, which must be allowed."""
        assert not self.done, "the answer is complete"
        phase = self._phases.add(token)
        if self._phase == "answer":
            self._sampled += 1
            if phase == "answer" or not isinstance(self._answer, FreeAnswer):
                self._answer.take(token)
                self.done, self.cut = self._answer.done, self._answer.cut
            self._end_if_full()
            return
        was_forced = bool(self._forced)
        self._forced = self._forced[1:]
        self._sampled += not was_forced
        over = phase != "thoughts"
        if not was_forced and over:
            self._forced = self._phases.rest
        elif not was_forced and token in self._ends:
            self._forced = self._close[1:]
        elif not was_forced and self._sampled >= self._budget:
            self._forced = self._close
        if (over or was_forced) and not self._forced:
            self._phase = "answer"
            self._end_if_full()

    def _end_if_full(self) -> None:
        if not self.done and self._sampled == self._total:
            self.done = self.cut = True
