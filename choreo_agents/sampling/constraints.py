"""Constraints on an answer, token by token: a grammar, a list of choices, your own; and thinking before the answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator
from torch import Tensor

from choreo_agents.errors import ConstraintError

Kind = Literal["json_schema", "regex", "grammar"]


class Grammar(BaseModel):
    """Grammar of a whole answer, given and serialized as a dict with one of three keys.

    `{"json_schema": {...}}`, whose properties are generated in the order of the schema; `{"regex": "..."}`; or
    `{"grammar": "..."}`, in Lark's notation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    text: str = Field(min_length=1)
    """The regex or grammar, or a schema as JSON."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or set(data) == {"kind", "text"}:
            return data
        [kind, *more] = data or [None]
        if more or kind not in get_args(Kind):
            raise ValueError(
                f"a constraint must have one of json_schema, regex and grammar, such as {{'regex': 'yes|no'}}, not "
                f"{list(data)!r}"
            )
        text = data[kind]
        if kind == "json_schema" and not isinstance(text, str):
            try:
                text = json.dumps(text, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"the schema cannot be written as JSON: {error}") from error
        return {"kind": kind, "text": text}

    @model_serializer
    def plain(self) -> dict[str, Any]:
        """Return the dict in which it is given."""
        return {self.kind: json.loads(self.text) if self.kind == "json_schema" else self.text}


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
    """True if the answer ended only because no more tokens may be sampled."""
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


Path = tuple[int, ...]
"""Tokens of a text; not empty."""
Watcher = Callable[[int], bool]
"""Function that gets every token in order, and returns whether the text it looks for is complete with it."""


@dataclass(frozen=True)
class AnswerPaths:
    """All tokenizations of the lead (`answer_prefix`) and of the choices that may follow it.

    sampled    free . . . . | lead . . | choice . . | end, where a longer choice could have followed
    """

    choices: frozenset[Path]
    """Tokens of the choices, without end tokens."""
    lead: frozenset[Path]
    """Tokens of the lead, likewise; empty if there is none."""
    ends: frozenset[int]
    """The model's end tokens."""
    max_tokens: int
    """Upper bound on sampled tokens."""

    @property
    def needed(self) -> int:
        """Tokens of the longest lead and the longest choice; an end after a shorter choice never takes more."""
        return max(map(len, self.lead), default=0) + max(map(len, self.choices))

    @property
    def longest(self) -> int:
        """Upper bound on the tokens that are sampled."""
        return self.max_tokens if self.lead else self.needed

    def is_ambiguous(self) -> bool:
        """Return whether a choice starts a longer one, so that an end token decides between them."""
        return any(path[:length] in self.choices for path in self.choices for length in range(1, len(path)))


class ChoiceConstraint(AnswerConstraint):
    """Constraint of a decode to one of the allowed answers.

    Args:
        paths: Tokens of lead and choices; `max_tokens` must be enough for the longest of both.
        lead_complete: Recognizes the lead in the free part, where a model may write it in other tokens than ours.
        stop_complete: Recognizes texts in the free part after which the lead must follow.
    """

    def __init__(
        self, paths: AnswerPaths, lead_complete: Watcher | None = None, stop_complete: Watcher | None = None
    ) -> None:
        assert paths.needed <= paths.max_tokens, f"{paths.max_tokens} tokens are too few for {paths!r}"
        self.paths, self.longest = paths, paths.longest
        self._lead_complete = lead_complete or (lambda token: False)
        self._stop_complete = stop_complete or (lambda token: False)
        self._written: list[int] = []
        self._part: Literal["free", "lead", "choice"] = "free"
        self._rest: frozenset[Path] = frozenset()
        """Rest of each path that can still be followed; an empty rest is a complete path."""
        if not paths.lead:
            self._part, self._rest = "choice", paths.choices
        elif self._must_force():
            self._force_lead()

    def allowed(self) -> tuple[int, ...] | None:
        """Return the tokens that may come next, ascending; None: any."""
        if self._part == "free":
            return None
        following = {path[0] for path in self._rest if path}
        if self._part == "choice" and () in self._rest:
            following |= self.paths.ends
        return tuple(sorted(following))

    def refuses(self, token: int) -> bool:
        """Refuse an end token before the lead; the lead is forced from then on."""
        if self._part != "free" or token not in self.paths.ends:
            return False
        self._force_lead()
        return True

    def take(self, token: int) -> None:
        """Accept a token, which must be allowed."""
        assert not self.done, "the answer is complete"
        self._written.append(token)
        if self._part == "choice":
            self.done = () in self._rest and token in self.paths.ends
            if not self.done:
                self._follow(token)
                self.done = self._rest == {()}
            return
        # Both must get every token: they decode text incrementally.
        lead_complete, stop_complete = self._lead_complete(token), self._stop_complete(token)
        if self._part == "lead":
            self._follow(token)
        if lead_complete or () in self._rest:
            self._part, self._rest = "choice", self.paths.choices
        elif self._part == "free" and (stop_complete or self._must_force()):
            self._force_lead()

    def _follow(self, token: int) -> None:
        self._rest = frozenset(path[1:] for path in self._rest if path[:1] == (token,))
        assert self._rest, f"token {token} is not allowed here"

    def _must_force(self) -> bool:
        """Return whether the remaining tokens are just enough for the lead and an answer."""
        return self.paths.max_tokens - len(self._written) <= self.paths.needed

    def _force_lead(self) -> None:
        """Require the lead, or only the rest of it if the free part ends with its start."""
        self._part, self._rest = "lead", self.paths.lead
        for length in range(max(map(len, self.paths.lead)) - 1, 0, -1):
            tail = tuple(self._written[-length:])
            begun = frozenset(path[length:] for path in self.paths.lead if len(path) > length and path[:length] == tail)
            if begun:
                self._rest = begun
                return


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
