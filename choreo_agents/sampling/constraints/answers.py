"""Which tokens may come next, where the answer must be one of a list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from choreo_agents.sampling.constraints.base import AnswerConstraint

Path = tuple[int, ...]
"""The tokens of a text: not empty."""
Watcher = Callable[[int], bool]
"""Told tokens in order; whether what it looks for is complete with this one."""


@dataclass(frozen=True)
class AnswerPaths:
    """All ways to write a lead and the answers that may follow it.

    sampled    free . . . . | lead . . | choice . . | end, where a longer choice could have followed
    """

    choices: frozenset[Path]
    """Hold no end."""
    lead: frozenset[Path]
    """The same; none if the answer is all that is sampled."""
    ends: frozenset[int]
    """Tokens with which the model says that it is done."""
    max_tokens: int
    """To sample at most."""

    @property
    def needed(self) -> int:
        """Tokens that the longest lead and the longest choice take: an end never takes more than the choice it cuts."""
        return max(map(len, self.lead), default=0) + max(map(len, self.choices))

    @property
    def longest(self) -> int:
        """Tokens that are sampled at most."""
        return self.max_tokens if self.lead else self.needed

    def is_ambiguous(self) -> bool:
        """Whether a choice is complete where another can go on, so that it takes an end to stop there."""
        return any(path[:length] in self.choices for path in self.choices for length in range(1, len(path)))


class ChoiceConstraint(AnswerConstraint):
    """Leads one decode to an allowed answer, token by token. Knows no text and no logits.

    Args:
        paths: Where it may go; `max_tokens` must be enough for the longest lead and choice.
        lead_complete: Watches the free part, since a model may write the lead in other tokens than ours.
        stop_complete: Watches it for texts after which the lead must follow.
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
        self._left: frozenset[Path] = frozenset()
        """What is left of each path that can still be followed; an empty one is complete."""
        if not paths.lead:
            self._part, self._left = "choice", paths.choices
        elif self._must_force():
            self._force_lead()

    def allowed(self) -> tuple[int, ...] | None:
        """The tokens that may come next, in ascending order; None: any."""
        if self._part == "free":
            return None
        following = {path[0] for path in self._left if path}
        if self._part == "choice" and () in self._left:
            following |= self.paths.ends
        return tuple(sorted(following))

    def refuses(self, token: int) -> bool:
        """Whether the model wanted to end before the lead: it is forced then, and another token must be chosen."""
        if self._part != "free" or token not in self.paths.ends:
            return False
        self._force_lead()
        return True

    def take(self, token: int) -> None:
        """Go on with this token, which must be allowed."""
        assert not self.done, "the answer is complete"
        self._written.append(token)
        if self._part == "choice":
            self._take_choice(token)
            return
        # Both watch every token, or they would lose the thread of the text.
        lead_complete, stop_complete = self._lead_complete(token), self._stop_complete(token)
        if self._part == "lead":
            self._follow(token)
        if lead_complete or () in self._left:
            self._part, self._left = "choice", self.paths.choices
        elif self._part == "free" and (stop_complete or self._must_force()):
            self._force_lead()

    def _take_choice(self, token: int) -> None:
        if () in self._left and token in self.paths.ends:
            self.done = True
            return
        self._follow(token)
        self.done = self._left == {()}

    def _follow(self, token: int) -> None:
        self._left = frozenset(path[1:] for path in self._left if path[:1] == (token,))
        assert self._left, f"token {token} is not allowed here"

    def _must_force(self) -> bool:
        """Whether the tokens left are just enough for the lead and an answer."""
        return self.paths.max_tokens - len(self._written) <= self.paths.needed

    def _force_lead(self) -> None:
        """Require the lead, or the rest of it if the free part ends with its start."""
        self._part, self._left = "lead", self.paths.lead
        for have in range(max(map(len, self.paths.lead)) - 1, 0, -1):
            tail = tuple(self._written[-have:])
            begun = frozenset(path[have:] for path in self.paths.lead if len(path) > have and path[:have] == tail)
            if begun:
                self._left = begun
                return
