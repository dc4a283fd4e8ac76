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
class Message:
    """One message of a problem: given to the model, or to be said by it."""

    name: str
    """Unique in its problem."""
    role: Role
    text: str
    """The words; of a message to be said, words that would be right."""
    author: str | None = None
    """Who says it, in the turn's header."""
    parents: tuple[str, ...] = ()
    """The messages it is encoded after, in view order; of a message to be said, all that its author sees."""
    said: bool = False
    """Whether the model is to say it."""


class Scorer(Protocol):
    """Decides how good what was said is."""

    def __call__(self, said: Said) -> float:
        """The share of the answer that is right, from 0 to 1; a problem counts as solved at 1."""
        ...


@dataclass(frozen=True)
class Problem:
    """Messages in an order in which parents come first, what would be right, and how answers are scored."""

    task: str
    messages: tuple[Message, ...]
    gold: str
    scorer: Scorer
    by_name: Mapping[str, Message] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known: dict[str, Message] = {}
        for message in self.messages:
            if message.name in known:
                raise ValueError(f"two messages of {self.task!r} are named {message.name!r}")
            missing = [parent for parent in message.parents if parent not in known]
            if missing:
                raise ValueError(f"{message.name!r} of {self.task!r} comes before its parents {missing!r}")
            known[message.name] = message
        if not any(message.said for message in self.messages):
            raise ValueError(f"nothing is to be said in {self.task!r}")
        object.__setattr__(self, "by_name", known)

    def score(self, said: Said) -> float:
        """The share of the answer that is right, from 0 to 1.

        Args:
            said: The words of every message to be said, by name.
        """
        return self.scorer(said)

    def gold_said(self) -> dict[str, str]:
        """What a faultless model could say."""
        return {message.name: message.text for message in self.messages if message.said}

    @property
    def split(self) -> Split:
        """The one split this problem belongs to, by the words that are given."""
        return split_of(message.text for message in self.messages if not message.said)


def split_of(given: Iterable[str]) -> Split:
    """The split of a problem with these given texts: eight tenths train, one tenth each of dev and test.

    It depends on the words alone, not on their order, on who says them, or on the task's name: the same facts told in
    another order stay on the same side.
    """
    words = sorted(word for text in given for word in text.split())
    bucket = hashlib.blake2b(" ".join(words).encode(), digest_size=4).digest()[0]
    return "dev" if bucket < 26 else "test" if bucket < 52 else "train"


def siblings(problem: Problem, view: Iterable[str]) -> list[list[str]]:
    """A view's messages in groups: neighbours that were encoded after the same parents stand in one group.

    Of such neighbours neither has seen the other; a parallel layout may place them at one offset.
    """
    groups: list[list[str]] = []
    for name in view:
        message = problem.by_name[name]
        if groups and message.parents and problem.by_name[groups[-1][-1]].parents == message.parents:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups
