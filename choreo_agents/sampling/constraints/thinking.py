"""Constraint of a model that thinks before it answers: bounds its thoughts, then constrains its answer."""

from __future__ import annotations

from typing import Literal, Protocol

from choreo_agents.sampling.constraints.base import Allowed, AnswerConstraint, FreeAnswer, TokenConstraint

Phase = Literal["thoughts", "close", "answer"]
BLANK_LINES = 2
"""Tokens of empty lines before an answer that are not counted as part of it."""


class Phases(Protocol):
    """Classifier of tokens: part of the thoughts, of the answer, or in between."""

    def add(self, token: int) -> Phase:
        """Add a token and return its phase."""
        ...

    @property
    def rest(self) -> tuple[int, ...]:
        """Tokens that must still come before the answer, once the thoughts are over; empty before."""
        ...


class ThinkingConstraint(AnswerConstraint):
    """Constraint that lets a model think for a number of tokens, close its thoughts, and answer.

        sampled    thoughts . . . . . | close . | answer . . . | end

    The model closes its thoughts itself, or is forced to: when it would end the message, or when the budget is used up.
    Empty lines before an unconstrained answer are not part of it, and do not end it.

    Args:
        budget: Upper bound on the tokens of thoughts; 0: none.
        close: Tokens between thoughts and answer.
        ends: Tokens that end a message.
        phases: Classifies the tokens.
        answer: Constrains the answer.
        total: Upper bound on the tokens of both, without forced ones; None: only the bounds of each.
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
        """Tokens that must come next."""
        self.answers = False
        """True if the thoughts are closed, so that the next token is the answer's."""
        self._sampled = 0

    @property
    def leader(self) -> TokenConstraint:
        """The answer's constraint once the thoughts are closed; before, itself."""
        return self._answer.leader if self.answers else self

    def allowed(self) -> Allowed:
        """Return the forced token, or what the answer's constraint allows."""
        return self._answer.allowed() if self.answers else self._forced[:1] or None

    def permits(self, token: int) -> bool:
        """Implement `AnswerConstraint`."""
        return self._answer.permits(token) if self.answers else super().permits(token)

    def refuses(self, token: int) -> bool:
        """Refuse an end token in the thoughts, which are closed then; in the answer, ask its constraint."""
        if self.answers:
            return self._answer.refuses(token)
        if self._forced or token not in self._ends or token == self._close[0]:
            return False
        self._forced = self._close
        return True

    def take(self, token: int) -> None:
        """Accept a token, which must be allowed."""
        assert not self.done, "the answer is complete"
        phase = self._phases.add(token)
        if self.answers:
            self._sampled += 1
            if phase == "answer" or not isinstance(self._answer, FreeAnswer):
                self._answer.take(token)
                self.done, self.cut = self._answer.done, self._answer.cut
            self._end_if_full()
            return
        over = phase != "thoughts" or bool(self._forced)
        if self._forced:
            self._forced = self._forced[1:]
        else:
            self._sampled += 1
            if over:
                self._forced = self._phases.rest
            elif token in self._ends:
                self._forced = self._close[1:]
            elif self._sampled >= self._budget:
                self._forced = self._close
        if over and not self._forced:
            self.answers = True
            self._end_if_full()

    def _end_if_full(self) -> None:
        if not self.done and self._sampled == self._total:
            self.done = self.cut = True
