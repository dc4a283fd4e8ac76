"""What leads a decode, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.errors import ConstraintError

Allowed = Sequence[int] | Tensor | None
"""Words of the vocabulary that may come next: their ids, or a mask of all of them, bool, [vocabulary]; None: any."""


class TokenConstraint(Protocol):
    """Says of one answer, token by token, what may come next. It is asked on the engine's thread: it must be quick.

    Where the answer may end, an end token is among what is allowed, and is taken as any other token. A constraint that
    raises, or allows nothing, fails its own call with `ConstraintError`, and no other.
    """

    @property
    def done(self) -> bool:
        """Whether the answer is complete and nothing may follow it."""
        ...

    def allowed(self) -> Allowed:
        """What may come next; asked again before `take`, it says the same."""
        ...

    def take(self, token: int) -> None:
        """Go on with this token, which was allowed."""
        ...


class AnswerConstraint(ABC):
    """Leads one decode from its first token to its last: a `TokenConstraint` that also says where it ends."""

    done = False
    cut = False
    """Whether the answer is complete only since no more tokens may be sampled."""
    longest: int
    """Tokens that are sampled at most."""

    @property
    def leader(self) -> TokenConstraint:
        """Who says what may come next: itself, or whom it has handed over to."""
        return self

    @abstractmethod
    def allowed(self) -> Allowed:
        """See `TokenConstraint`."""

    @abstractmethod
    def take(self, token: int) -> None:
        """See `TokenConstraint`."""

    def refuses(self, token: int) -> bool:
        """Whether another token must be chosen in the place of this one; asked once for each place."""
        return False

    def permits(self, token: int) -> bool:
        """Whether this token may come next: as `allowed` says, also of a vocabulary that nobody can list."""
        allowed = self.allowed()
        return allowed is None or (bool(allowed[token]) if isinstance(allowed, Tensor) else token in allowed)


class FreeAnswer(AnswerConstraint):
    """An answer of any words, until it stops.

    Args:
        max_tokens: At most.
        stops: Tokens that end it.
        stop_complete: Told every token: whether a text to stop at is complete with it.
    """

    def __init__(
        self, max_tokens: int, stops: frozenset[int], stop_complete: Callable[[int], bool] | None = None
    ) -> None:
        self.longest = max_tokens
        self._stops, self._stop_complete = stops, stop_complete
        self._taken = 0

    def allowed(self) -> Allowed:
        """Any."""
        return None

    def take(self, token: int) -> None:
        """Go on with this token."""
        self._taken += 1
        stopped = self._stop_complete is not None and self._stop_complete(token)
        stopped = stopped or token in self._stops
        self.cut = self._taken == self.longest and not stopped
        self.done = stopped or self.cut


class ConstrainedAnswer(AnswerConstraint):
    """An answer that a `TokenConstraint` leads, within so many tokens.

    It is complete where the constraint is done; and where it may end, at a text to stop at or after as many tokens as
    there may be. What goes wrong while the constraint is asked is raised by `take`: there it is this call's alone, and
    no reason to repeat a step that others are in.

    Args:
        constraint: Says what may come next.
        max_tokens: To sample at most.
        ends: Tokens that end a message.
        vocabulary: Words that there are.
        text: Of tokens, for what an error tells.
        stop_complete: Told every token: whether a text to stop at is complete with it.
        may_be_cut: Whether `max_tokens` may cut it where it may not end.
    """

    def __init__(
        self,
        constraint: TokenConstraint,
        max_tokens: int,
        ends: frozenset[int],
        vocabulary: int,
        text: Callable[[list[int]], str],
        stop_complete: Callable[[int], bool] | None = None,
        *,
        may_be_cut: bool = False,
    ) -> None:
        self.longest, self._may_be_cut = max_tokens, may_be_cut
        self._constraint, self._ends, self._vocabulary = constraint, ends, vocabulary
        self._text, self._stop_complete = text, stop_complete
        self._taken: list[int] = []
        self._failure: Exception | None = None

    @property
    def leader(self) -> TokenConstraint:
        """See `AnswerConstraint`."""
        return self._constraint

    def allowed(self) -> Allowed:
        """What the constraint allows; any, if it cannot say: `take` then raises."""
        if self._failure is not None:
            return None
        try:
            return _checked(self._constraint.allowed(), self._vocabulary)
        except Exception as error:
            self._failure = error
            return None

    def permits(self, token: int) -> bool:
        """See `AnswerConstraint`."""
        known: Callable[[int], bool] | None = getattr(self._constraint, "permits", None)
        if known is not None:
            return known(token)
        return super().permits(token) and self._failure is None

    def take(self, token: int) -> None:
        """Go on with this token.

        Raises:
            ConstraintError: The constraint had none to allow, or has failed; or this was the last of as many as there
                may be, and the answer may not end with it.
        """
        assert not self.done, "the answer is complete"
        before = list(self._taken)
        self._taken.append(token)
        if self._failure is None:
            try:
                self._constraint.take(token)
                self.done = bool(self._constraint.done)
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise self._error(f"its constraint cannot go on: {self._failure}", before) from self._failure
        stopped = self._stop_complete is not None and self._stop_complete(token)
        if self.done:
            return
        is_full = len(self._taken) == self.longest
        if is_full or stopped or token in self._ends:
            may_end = any(map(self.permits, self._ends))
            self.done = may_end or (is_full and self._may_be_cut)
            self.cut = self.done and not (may_end and (stopped or token in self._ends))
        if is_full and not self.done:
            raise self._error(
                f"it was cut at max_tokens={self.longest}, where its constraint does not let it end: raise "
                "max_tokens, or bound what may be said (maxLength, maxItems, maximum)",
                self._taken,
            )

    def _error(self, why: str, tokens: list[int]) -> ConstraintError:
        said = self._text(tokens)
        return ConstraintError(f"the answer has no end, for {why}; it said {said[-200:]!r}", said)


def _checked(allowed: Allowed, vocabulary: int) -> Allowed:
    """The same, as tokens can be drawn by; raises `ValueError` if none can."""
    if allowed is None:
        return None
    if isinstance(allowed, Tensor):
        if allowed.dtype != torch.bool or tuple(allowed.shape) != (vocabulary,):
            raise ValueError(
                f"a mask must be bool, [{vocabulary}], not {str(allowed.dtype)[6:]}, {list(allowed.shape)}"
            )
        if not bool(allowed.any()):
            raise ValueError("it allows nothing")
        return allowed
    ids = tuple(map(int, allowed))
    if not ids:
        raise ValueError("it allows nothing")
    if not (min(ids) >= 0 and max(ids) < vocabulary):
        raise ValueError(f"it allows {min(ids)} to {max(ids)}, and token ids run from 0 to {vocabulary - 1}")
    return ids
