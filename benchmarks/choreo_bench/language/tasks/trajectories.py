"""Long tool-like trajectories, one per branch: a question over all of them, and each branch's own summary."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import EachExact, FirstSentence, Mean
from choreo_bench.language.sentences import draw_distinct
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to

SEARCH = "Agents find things and say the box."
Search = list[tuple[str, int | None]]
"""Things searched for, in order, and the box each was found in."""


@dataclass(frozen=True)
class Trajectories:
    """Branches search for things of their own; most are found, each in a box."""

    branches: int = 3
    calls: int = 8
    """Of each branch, five tokens a call. All branches together make at most 30: one for each thing there is."""
    lost: float = 0.25
    """Share of things that are not found."""
    questions: int = 1
    short: bool = False
    """The branches come summarised instead of whole."""
    name: str = "trajectories"

    def draw(self, rng: random.Random) -> Problem:
        searches = draw_searches(rng, self.branches, self.calls, self.lost)
        *agents, author = draw_agents(rng, self.branches + 1)
        draft = Draft(SEARCH)
        draft.add("problem", "user", "Find all things.")
        words = [summary(search) if self.short else trajectory(search) for search in searches]
        draft.hear(list(zip(agents, words, strict=True)))
        gold: list[FirstSentence] = []
        for number in range(1, self.questions + 1):
            thing, box = rng.choice([call for search in searches for call in search if call[1] or not self.short])
            answer = f"The {thing}: {result(box)}."
            draft.add(f"question {number}", "user", f"Where are the {thing}?")
            gold.append(FirstSentence(draft.say(f"answer {number}", answer, author), answer))
        return draft.done(self.name, " ".join(score.gold for score in gold), Mean(tuple(gold)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        calls = up_to(rng, 2, 10, hardness)
        branches = up_to(rng, 1, min(4, len(vocabulary.OBJECTS) // calls), hardness)
        return replace(self, branches=branches, calls=calls, questions=rng.randint(1, 4), short=rng.random() < 0.3)


@dataclass(frozen=True)
class Summary:
    """A branch that says what its trajectory found."""

    calls: int = 8
    lost: float = 0.25
    """As for `Trajectories`."""
    name: str = "summary"

    def draw(self, rng: random.Random) -> Problem:
        [search] = draw_searches(rng, 1, self.calls, self.lost)
        [agent] = draw_agents(rng, 1)
        draft = Draft(SEARCH)
        draft.add("problem", "user", "Find all things.")
        draft.hear([(agent, trajectory(search))])
        draft.add("ask", "user", "Say what you found.")
        gold = summary(search)
        answer = draft.say("answer", gold, agent)
        return draft.done(self.name, gold, EachExact(((answer, gold),)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, calls=up_to(rng, 2, 10, hardness))


def draw_searches(rng: random.Random, branches: int, calls: int, lost: float) -> list[Search]:
    """Each branch's search for things of its own; one thing at least is found."""
    things = draw_distinct(rng, vocabulary.OBJECTS, branches * calls)
    boxes = [None if rng.random() < lost else rng.randint(1, 40) for _ in things]
    if not any(boxes):
        boxes[rng.randrange(len(boxes))] = rng.randint(1, 40)
    made = list(zip(things, boxes, strict=True))
    return [made[start : start + calls] for start in range(0, len(made), calls)]


def result(box: int | None) -> str:
    """Write the result of a call."""
    return str(box) if box else "none"


def trajectory(search: Search) -> str:
    """A call and its result for each thing."""
    return " ".join(f"Find {thing}: {result(box)}." for thing, box in search)


def summary(search: Search) -> str:
    """Write a summary of the calls that found something."""
    return trajectory([(thing, box) for thing, box in search if box]) or "Find none."
