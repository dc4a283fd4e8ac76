"""Contracts of constraints, the unconstrained answer, and the adapter of a user's `TokenConstraint`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.errors import ConstraintError

Allowed = Sequence[int] | Tensor | None
"""Tokens that may come next: their ids, or a mask, bool, [vocabulary]; None: any."""


class TokenConstraint(Protocol):
    """Constraint on one answer, token by token. It is called on the engine's thread, so it must be fast.

    Where the answer may end, it allows an end token, and takes it like any other token. A constraint that raises, or
    allows nothing, fails only its own call, with `ConstraintError`.
    """

    @property
    def done(self) -> bool:
        """True if the answer is complete and nothing may follow it."""
        ...

    def allowed(self) -> Allowed:
        """Return the tokens that may come next; the same on every call before `take`."""
        ...

    def take(self, token: int) -> None:
        """Accept a token, which was allowed."""
        ...


class AnswerConstraint(ABC):
    """Constraint of one decode from its first token to its last, which also decides where it ends."""

    done = False
    cut = False
    """Whether the answer ended only because no more tokens may be sampled."""
    longest: int
    """Upper bound on the tokens that are sampled."""

    @property
    def leader(self) -> TokenConstraint:
        """The constraint in charge of the next token: itself, or one to which it delegates."""
        return self

    @abstractmethod
    def allowed(self) -> Allowed:
        """Implement `TokenConstraint`."""

    @abstractmethod
    def take(self, token: int) -> None:
        """Implement `TokenConstraint`."""

    def refuses(self, token: int) -> bool:
        """Return whether another token must be drawn instead of this one; called once for each position."""
        return False

    def permits(self, token: int) -> bool:
        """Return whether a token may come next, without listing all of them where a subclass can."""
        allowed = self.allowed()
        return allowed is None or (bool(allowed[token]) if isinstance(allowed, Tensor) else token in allowed)


class FreeAnswer(AnswerConstraint):
    """An unconstrained answer, until it stops.

    Args:
        max_tokens: Upper bound on its tokens.
        stops: Tokens that end it.
        stop_complete: Gets every token, and returns whether a stop text is complete with it.
    """

    def __init__(
        self, max_tokens: int, stops: frozenset[int], stop_complete: Callable[[int], bool] | None = None
    ) -> None:
        self.longest = max_tokens
        self._stops, self._stop_complete = stops, stop_complete
        self._taken = 0

    def allowed(self) -> Allowed:
        """Allow any token."""
        return None

    def take(self, token: int) -> None:
        """Accept a token."""
        self._taken += 1
        stopped = self._stop_complete is not None and self._stop_complete(token)
        stopped = stopped or token in self._stops
        self.cut = self._taken == self.longest and not stopped
        self.done = stopped or self.cut


class ConstrainedAnswer(AnswerConstraint):
    """An answer under a `TokenConstraint`, within a number of tokens.

    It is complete when the constraint is done; or, where it may end, at a stop text or the last token. Errors of the
    constraint are kept and raised by `take`, where they fail this call only, instead of a step with other calls in it.

    Args:
        constraint: Restricts the next token.
        max_tokens: Upper bound on sampled tokens.
        ends: Tokens that end a message.
        vocabulary: Size of the vocabulary.
        text: Decodes tokens, for error messages.
        stop_complete: Gets every token, and returns whether a stop text is complete with it.
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
        """The user's constraint."""
        return self._constraint

    def allowed(self) -> Allowed:
        """Return what the constraint allows; if it fails, allow any token, after which `take` raises."""
        if self._failure is not None:
            return None
        try:
            return _checked(self._constraint.allowed(), self._vocabulary)
        except Exception as error:
            self._failure = error
            return None

    def permits(self, token: int) -> bool:
        """Implement `AnswerConstraint`, by the constraint's own `permits` if it has one."""
        permits: Callable[[int], bool] | None = getattr(self._constraint, "permits", None)
        if permits is not None:
            return permits(token)
        return super().permits(token) and self._failure is None

    def take(self, token: int) -> None:
        """Accept a token.

        Raises:
            ConstraintError: The constraint failed or allowed nothing; or this was the last token, and the answer may
                not end with it.
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
            raise self._error(f"the constraint failed: {self._failure}", before) from self._failure
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
                f"max_tokens={self.longest} was reached where the constraint does not let it end: raise max_tokens, or "
                "bound the answer (maxLength, maxItems, maximum)",
                self._taken,
            )

    def _error(self, why: str, tokens: list[int]) -> ConstraintError:
        text = self._text(tokens)
        return ConstraintError(f"the answer is incomplete: {why}; its text ends with {text[-200:]!r}", text)


def _checked(allowed: Allowed, vocabulary: int) -> Allowed:
    """Return `allowed`, checked; raise `ValueError` if no token can be drawn by it."""
    if allowed is None:
        return None
    if isinstance(allowed, Tensor):
        if allowed.dtype != torch.bool or tuple(allowed.shape) != (vocabulary,):
            raise ValueError(
                f"a mask must be bool of shape [{vocabulary}], not {str(allowed.dtype)[6:]} of {list(allowed.shape)}"
            )
        if not bool(allowed.any()):
            raise ValueError("it allows no token")
        return allowed
    ids = tuple(map(int, allowed))
    if not ids:
        raise ValueError("it allows no token")
    if not (min(ids) >= 0 and max(ids) < vocabulary):
        raise ValueError(f"it allows {min(ids)} to {max(ids)}, but token ids run from 0 to {vocabulary - 1}")
    return ids
