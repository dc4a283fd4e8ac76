"""Facts about people: the sentences that most problems are made of."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from choreo_bench.language import vocabulary

UNKNOWN = "I do not know."
AGREE, KEEP, CHANGE = "We all agree.", "I keep my answer.", "I change my answer."


class Fact(Protocol):
    """A sentence about one person, and the question it answers."""

    @property
    def person(self) -> str: ...

    def sentence(self) -> str: ...

    def question(self) -> str: ...


@dataclass(frozen=True)
class Has:
    """A fact about how many things of a kind somebody has."""

    person: str
    number: str
    color: str
    objects: str

    def sentence(self) -> str:
        return f"{self.person} has {self.what()}."

    def what(self) -> str:
        """The things, as in `3 red kites`."""
        return f"{self.number} {self.color} {self.objects}"

    def question(self) -> str:
        return f"What does {self.person} have?"


@dataclass(frozen=True)
class Visits:
    """A fact about the city that somebody visits."""

    person: str
    city: str

    def sentence(self) -> str:
        return f"{self.person} visits {self.city}."

    def question(self) -> str:
        return f"What does {self.person} visit?"


@dataclass(frozen=True)
class Likes:
    """A fact about what somebody likes."""

    person: str
    food: str

    def sentence(self) -> str:
        return f"{self.person} likes {self.food}."

    def question(self) -> str:
        return f"What does {self.person} like?"


@dataclass(frozen=True)
class Friend:
    """A fact about somebody's friend."""

    person: str
    friend: str

    def sentence(self) -> str:
        return f"The friend of {self.person} is {self.friend}."

    def question(self) -> str:
        return f"Who is the friend of {self.person}?"


LEAST, MOST = 2, 20
"""Of what people have."""


def draw_has(rng: random.Random, person: str) -> Has:
    """Draw what a person has: 2 to 20 of a colour and kind."""
    number = str(rng.randint(LEAST, MOST))
    return Has(person, number, rng.choice(vocabulary.COLORS), rng.choice(vocabulary.OBJECTS))


def draw_facts(rng: random.Random, count: int, kinds: int | None = None) -> list[Has]:
    """`count` facts about what different people have.

    Args:
        rng: Decides.
        count: How many.
        kinds: Draw numbers, colours and things from only so many of each, so that facts are easily confused.
    """
    people = draw_distinct(rng, vocabulary.PEOPLE, count)
    if kinds is None:
        return [draw_has(rng, person) for person in people]
    numbers = rng.sample(range(LEAST, MOST + 1), kinds)
    colors, things = rng.sample(vocabulary.COLORS, kinds), rng.sample(vocabulary.OBJECTS, kinds)
    return [Has(person, str(rng.choice(numbers)), rng.choice(colors), rng.choice(things)) for person in people]


def draw_about(rng: random.Random, person: str, kind: type[Fact]) -> Fact:
    """A fact of a kind (`Has`, `Visits` or `Likes`) about a person."""
    if kind is Has:
        return draw_has(rng, person)
    if kind is Visits:
        return Visits(person, rng.choice(vocabulary.CITIES))
    return Likes(person, rng.choice(vocabulary.FOODS))


def draw_distinct(rng: random.Random, among: Sequence[str], count: int) -> list[str]:
    """`count` different words.

    Raises:
        ValueError: There are not so many.
    """
    if not 0 < count <= len(among):
        raise ValueError(f"cannot draw {count!r} different words from {len(among)}")
    return rng.sample(among, count)


def with_wrong_number(rng: random.Random, fact: Has) -> Has:
    """The same fact with another number: what unreliable notes say."""
    wrong = rng.randint(LEAST, MOST - 1)
    return replace(fact, number=str(wrong + (wrong >= int(fact.number))))


def notes_text(facts: Iterable[Fact]) -> str:
    return "Notes: " + " ".join(fact.sentence() for fact in facts)


def plurality(own: str | None, others: Sequence[str]) -> str:
    """The answer most agents gave, `I do not know.` aside; ties go to one's own, then to the first heard."""
    heard = [answer for answer in ([] if own is None else [own]) + list(others) if answer != UNKNOWN]
    if not heard:
        return UNKNOWN
    counts = Counter(heard)
    best = max(counts.values())
    return next(answer for answer in heard if counts[answer] == best)


def revise(own: str, others: Sequence[str]) -> str:
    """Write an agent's turn in a later round: the plurality of the last answers, and how that compares with its own."""
    choice = plurality(own, others)
    if choice == UNKNOWN:
        return UNKNOWN
    if own != choice:
        return f"{choice} {CHANGE}"
    return f"{choice} {AGREE if all(other == own for other in others) else KEEP}"
