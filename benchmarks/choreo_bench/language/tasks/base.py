"""Protocol of tasks, and the draft on which a task writes its problems."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Protocol, Self, runtime_checkable

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem, ProblemMessage, Role, Scorer, Stop


@runtime_checkable
class Task(Protocol):
    """Draws problems of one kind: a frozen dataclass whose fields are its difficulty.

    A task needs nothing else to be drawn in splits, evaluated and trained on (see `benchmarks/docs/write-a-task.md`).
    """

    @property
    def name(self) -> str:
        """Names the task in tables; problems of two names never count as the same."""
        ...

    def draw(self, rng: random.Random) -> Problem:
        """Draw one problem of this difficulty; the generator alone decides which."""
        ...

    def varied(self, rng: random.Random, hardness: float) -> Self:
        """The same task at a difficulty drawn for training: easy at hardness 0, up to beyond the default at 1."""
        ...


@runtime_checkable
class AsksSeveral(Protocol):
    """A task that asks one thing of many that its messages tell."""

    def draw_several(self, rng: random.Random, questions: int) -> list[Problem]:
        """Draw what `draw` would, and the same messages with other questions and answers, as far as there are others.

        They differ in their last two messages: the question, and the answer.
        """
        ...


class Draft:
    """Collects the messages of a problem; unless told otherwise, each sees all that came before it."""

    def __init__(self, root: str, name: str = "rules") -> None:
        """Start with what everybody sees.

        Args:
            root: The public system turn.
            name: `rules` if it only says what the task is, which training text leaves out now and then.
        """
        self._messages: list[ProblemMessage] = []
        self.add(name, "system", root)

    @property
    def names(self) -> tuple[str, ...]:
        """The messages so far."""
        return tuple(message.name for message in self._messages)

    def text(self, name: str) -> str:
        """The words of a message."""
        return next(message.text for message in self._messages if message.name == name)

    def add(
        self,
        name: str,
        role: Role,
        text: str,
        *,
        author: str | None = None,
        sees: Iterable[str] | None = None,
        is_answer: bool = False,
    ) -> str:
        """Append a message and return its name."""
        parents = self.names if sees is None else tuple(sees)
        self._messages.append(ProblemMessage(name, role, text, author, parents, is_answer))
        return name

    def say(self, name: str, text: str, author: str | None = None, sees: Iterable[str] | None = None) -> str:
        """Append a message that the model is to say."""
        return self.add(name, "assistant", text, author=author, sees=sees, is_answer=True)

    def hear(self, texts: Sequence[tuple[str, str]], sees: Iterable[str] | None = None) -> list[str]:
        """Append what several authors said, none of whom has heard another.

        Args:
            texts: Authors and their words.
            sees: What each of them has seen; by default all before the first of them.
        """
        seen = self.names if sees is None else tuple(sees)
        return [self.add(author, "assistant", words, author=author, sees=seen) for author, words in texts]

    def done(
        self, task: str, gold: str, scorer: Scorer, *, key: tuple[str, ...] | None = None, stop: Stop | None = None
    ) -> Problem:
        """The problem; `key` and `stop` as there."""
        return Problem(task, tuple(self._messages), gold, scorer, key, stop)


def draw_agents(rng: random.Random, count: int) -> list[str]:
    """Names of `count` different speakers; where there are not so many, the first of them have other people's names."""
    others = rng.sample(vocabulary.PEOPLE, count - len(vocabulary.AGENTS)) if count > len(vocabulary.AGENTS) else []
    return others + rng.sample(vocabulary.AGENTS, count - len(others))


def up_to(rng: random.Random, least: int, most: int, hardness: float) -> int:
    """A whole number from `least` to somewhere below `most`: to `most` itself at hardness 1."""
    return rng.randint(least, least + round((most - least) * hardness))
