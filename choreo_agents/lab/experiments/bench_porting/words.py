"""What is said to and by a team: words that mean nothing, of given lengths, the same in every way."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.language import vocabulary
from choreo_agents.models import LoadedModel

ROUTE = ("Alice", "Bruno", "Clara")
"""Whom the supervisor names in each turn, one after the other; the last of them answers."""
SUPERVISOR = "supervisor"
TEAM = (SUPERVISOR, *ROUTE)
Call = tuple[str, int, int, int]
"""Author, superstep, branch and call."""
_FEWEST = 50
"""Different words."""


@dataclass(frozen=True)
class TeamLengths:
    """In tokens, but for the headers of turns."""

    turns: int = 3
    """Questions of a user, in one thread."""
    system: int = 64
    """Of each system prompt."""
    task: int = 128
    """Of each question."""
    utterance: int = 64
    """Of each answer but the supervisor's, which is a name."""


class TeamWords:
    """Of one run.

    Args:
        model: Each word is one token of it.
        lengths: How many words.
        number: Of the run: others have other words.

    Raises:
        InvalidRequestError: Too few words of ours are one token of the model.
    """

    def __init__(self, model: LoadedModel, lengths: TeamLengths, number: int) -> None:
        encoded = {word: model.encode(f" {word}") for word in vocabulary.words() if word.isalpha()}
        self._tokens = {word: tokens[0] for word, tokens in encoded.items() if len(tokens) == 1}
        if len(self._tokens) < _FEWEST or not set(ROUTE) <= self._tokens.keys():
            raise InvalidRequestError(
                f"only {len(self._tokens)} words of ours are one token of {model.name!r}: texts of a given length take "
                f"{_FEWEST}, the names {', '.join(ROUTE)} among them"
            )
        self.lengths, self._number = lengths, number

    def _words(self, name: str, count: int) -> list[str]:
        return random.Random(f"{self._number} {name}").choices(sorted(self._tokens), k=count)

    @property
    def told(self) -> dict[str, str]:
        """System prompts by name."""
        return {name: " ".join(self._words(f"system {name}", self.lengths.system)) for name in TEAM}

    @property
    def tasks(self) -> list[str]:
        """What the user asks, turn by turn."""
        return [" ".join(self._words(f"task {turn}", self.lengths.task)) for turn in range(self.lengths.turns)]

    @property
    def calls(self) -> list[tuple[str, tuple[int, ...]]]:
        """All calls of a run in their order: who speaks, and its tokens."""
        made: list[tuple[str, tuple[int, ...]]] = []
        for turn in range(self.lengths.turns):
            for name in ROUTE:
                words = self._words(f"{name} {turn}", self.lengths.utterance)
                made.append((SUPERVISOR, (self._tokens[name],)))
                made.append((name, tuple(self._tokens[word] for word in words)))
        return made


class InTurn(Mapping[Call, tuple[int, ...]]):
    """What agents say, by call: of each author one after the other, in the order in which they are asked."""

    def __init__(self, words: TeamWords) -> None:
        self._left: dict[str, list[tuple[int, ...]]] = {}
        for name, tokens in words.calls:
            self._left.setdefault(name, []).append(tokens)
        self._said: dict[Call, tuple[int, ...]] = {}

    def __getitem__(self, call: Call) -> tuple[int, ...]:
        if call not in self._said:
            self._said[call] = self._left[call[0]].pop(0)
        return self._said[call]

    def __iter__(self) -> Iterator[Call]:
        return iter(self._said)

    def __len__(self) -> int:
        return len(self._said)
