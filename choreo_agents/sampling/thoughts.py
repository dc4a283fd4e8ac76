"""Which tokens may come next where a model thinks before it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from choreo_agents.sampling.answers import AnswerGuide

Phase = Literal["thoughts", "close", "answer"]


class Guide(Protocol):
    """Leads one decode, token by token."""

    done: bool
    """Whether the answer is complete and nothing may follow it."""

    @property
    def longest(self) -> int:
        """Tokens that are sampled at most."""
        ...

    def allowed(self) -> tuple[int, ...] | None:
        """The tokens that may come next, in ascending order; None: any."""
        ...

    def refuses(self, token: int) -> bool:
        """Whether another token must be chosen in the place of this one; asked once for each place."""
        ...

    def take(self, token: int) -> None:
        """Go on with this token, which must be allowed."""
        ...


class Phases(Protocol):
    """Tells of each token whether it is thought, said, or stands in between."""

    def add(self, token: int) -> Phase:
        """The phase of the next token."""
        ...

    @property
    def rest(self) -> tuple[int, ...]:
        """What is still to come before the answer, once the thoughts are over; empty before."""
        ...


@dataclass(frozen=True)
class AnswerEnds:
    """When an answer that nothing leads is complete."""

    max_tokens: int
    stops: frozenset[int]
    stop_complete: Callable[[int], bool] | None = None
    """Told every token of the answer: whether a text to stop at is complete with it."""


class ThoughtsGuide:
    """Lets a model think for so many tokens, has it close its thoughts, and lets it answer.

        sampled    thoughts . . . . . | close . | answer . . . | end

    The model closes its thoughts itself, or is made to: where it would end the message instead, or has thought for as
    long as it may.

    Args:
        budget: Tokens of thoughts at most; 0: none.
        close: What stands between thoughts and answer.
        ends: Tokens that end a message.
        phases: Watches the tokens.
        answer: When the answer is complete, or what leads it.
    """

    def __init__(
        self,
        budget: int,
        close: tuple[int, ...],
        ends: frozenset[int],
        phases: Phases,
        answer: AnswerEnds | AnswerGuide,
    ) -> None:
        self.done = False
        self._budget, self._close, self._ends = budget, close, ends
        self._phases = phases
        self._answer = answer
        self._forced = close if budget == 0 else ()
        """What is left of what must come next."""
        self._phase: Phase = "thoughts"
        self._thought = self._answered = 0

    @property
    def answers(self) -> bool:
        """Whether the thoughts are over and closed: what comes next is the answer's."""
        return self._phase == "answer"

    @property
    def longest(self) -> int:
        """Tokens that are sampled at most."""
        answer = self._answer
        return (
            self._budget + len(self._close) + (answer.max_tokens if isinstance(answer, AnswerEnds) else answer.longest)
        )

    def allowed(self) -> tuple[int, ...] | None:
        """The tokens that may come next, in ascending order; None: any."""
        if self._forced:
            return self._forced[:1]
        if self._phase == "answer" and isinstance(self._answer, AnswerGuide):
            return self._answer.allowed()
        return None

    def refuses(self, token: int) -> bool:
        """Whether the model wanted to end before it has answered, or as the answer's own guide has it."""
        if self._forced:
            return False
        if self._phase == "answer":
            return isinstance(self._answer, AnswerGuide) and self._answer.refuses(token)
        if token not in self._ends or token == self._close[0]:
            return False
        self._forced = self._close
        return True

    def take(self, token: int) -> None:
        """Go on with this token, which must be allowed."""
        assert not self.done, "the answer is complete"
        if self._phase == "answer":
            self._take_answer(token)
            return
        was_forced = bool(self._forced)
        self._forced = self._forced[1:]
        self._thought += not was_forced
        over = self._phases.add(token) != "thoughts"
        if not was_forced and over:
            self._forced = self._phases.rest
        elif not was_forced and token in self._ends:
            self._forced = self._close[1:]
        elif not was_forced and self._thought >= self._budget:
            self._forced = self._close
        if (over or was_forced) and not self._forced:
            self._phase = "answer"

    def _take_answer(self, token: int) -> None:
        answer = self._answer
        if isinstance(answer, AnswerGuide):
            answer.take(token)
            self.done = answer.done
            return
        self._answered += 1
        stopped = answer.stop_complete is not None and answer.stop_complete(token)
        self.done = stopped or token in answer.stops or self._answered == answer.max_tokens
