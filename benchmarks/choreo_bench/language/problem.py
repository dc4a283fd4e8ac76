"""A problem of the language: a small graph of messages, some given and some to be said, with a gold answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
Split = Literal["train", "dev", "test"]
Said = Mapping[str, str]
"""What was said, by message name."""


@dataclass(frozen=True)
class ProblemMessage:
    """A message of a problem: given to the model, or to be said by it."""

    name: str
    """Unique in its problem."""
    role: Role
    text: str
    """The words; of a message to be said, words that would be right."""
    author: str | None = None
    """Who says it, in the turn's header."""
    parents: tuple[str, ...] = ()
    """The messages it is encoded after, in view order; of a message to be said, all that its author sees."""
    is_answer: bool = False
    """Whether the model is to say it."""


class Scorer(Protocol):
    """Decides how good what was said is."""

    def __call__(self, answers: Said) -> float:
        """The share of the answer that is right, from 0 to 1; a problem counts as solved at 1."""
        ...


class Stop(Protocol):
    """Decides whether a problem is over before all of it was said."""

    def __call__(self, answers: Said) -> bool:
        """Return whether the answers so far end the problem."""
        ...


@dataclass(frozen=True)
class Problem:
    """Messages in an order in which parents come first, what would be right, and how answers are scored."""

    task: str
    messages: tuple[ProblemMessage, ...]
    gold: str
    scorer: Scorer
    key: tuple[str, ...] | None = None
    """Texts that decide its split, where several tasks ask the same thing in different words; None: all given ones."""
    stop: Stop | None = field(default=None, compare=False)
    """When the rest need not be said."""
    branches: tuple[str, ...] = ()
    """Messages that workers say side by side, for the answer to be made from (see `language.synthesis`)."""
    by_name: Mapping[str, ProblemMessage] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known: dict[str, ProblemMessage] = {}
        for message in self.messages:
            if message.name in known:
                raise ValueError(f"two messages of {self.task!r} are named {message.name!r}")
            missing = [parent for parent in message.parents if parent not in known]
            if missing:
                raise ValueError(f"{message.name!r} of {self.task!r} comes before its parents {missing!r}")
            known[message.name] = message
        strangers = [branch for branch in self.branches if branch not in known]
        if strangers:
            raise ValueError(f"the branch {strangers[0]!r} of {self.task!r} is not a message")
        if not any(message.is_answer for message in self.messages):
            raise ValueError(f"{self.task!r} has no message to answer")
        object.__setattr__(self, "by_name", known)

    def score(self, answers: Said) -> float:
        """The share of the answer that is right, from 0 to 1.

        Args:
            said: The words of every message to be said, by name; after an early stop, of those that were.
        """
        return self.scorer(answers)

    def gold_said(self) -> dict[str, str]:
        """Answers that a faultless model could give."""
        return {message.name: message.text for message in self.messages if message.is_answer}

    @property
    def split(self) -> Split:
        """The one split this problem belongs to, by the words that are given."""
        if self.key is not None:
            return split_of(self.key)
        return split_of(message.text for message in self.messages if not message.is_answer)


def split_of(given: Iterable[str]) -> Split:
    """The split of a problem with these given texts: eight tenths train, one tenth each of dev and test.

    It depends on the words alone, not on their order, on who says them, or on the task's name: the same facts told in
    another order stay on the same side.
    """
    words = sorted(word for text in given for word in text.split())
    bucket = hashlib.blake2b(" ".join(words).encode(), digest_size=4).digest()[0]
    return "dev" if bucket < 26 else "test" if bucket < 52 else "train"


def siblings(problem: Problem, view: Iterable[str]) -> list[list[str]]:
    """A view's messages in groups: neighbours of one role none of which has seen another stand in one group.

    A parallel layout may place them at one offset.
    """
    groups: list[list[str]] = []
    for name in view:
        role = problem.by_name[name].role
        known = _ancestors(problem, name)
        alike = groups and all(
            problem.by_name[other].role == role and other not in known and name not in _ancestors(problem, other)
            for other in groups[-1]
        )
        if alike:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _ancestors(problem: Problem, name: str) -> set[str]:
    """All that a message has seen, directly or through others."""
    ancestors: set[str] = set()
    queue = [name]
    for one in queue:
        new = [parent for parent in problem.by_name[one].parents if parent not in ancestors]
        ancestors.update(new)
        queue.extend(new)
    return ancestors
