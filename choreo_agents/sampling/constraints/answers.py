"""Constraint to a list of allowed answers, with an optional text before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from choreo_agents.sampling.constraints.base import AnswerConstraint

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
            self._take_choice(token)
            return
        # Both must get every token: they decode text incrementally.
        lead_complete, stop_complete = self._lead_complete(token), self._stop_complete(token)
        if self._part == "lead":
            self._follow(token)
        if lead_complete or () in self._rest:
            self._part, self._rest = "choice", self.paths.choices
        elif self._part == "free" and (stop_complete or self._must_force()):
            self._force_lead()

    def _take_choice(self, token: int) -> None:
        if () in self._rest and token in self.paths.ends:
            self.done = True
            return
        self._follow(token)
        self.done = self._rest == {()}

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
