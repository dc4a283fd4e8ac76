"""Long tool-like trajectories, one per branch: a question over all of them, and each branch's own summary."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from choreo_agents.language import vocabulary
from choreo_agents.language.problem import Problem
from choreo_agents.language.scoring import EachExact, FirstSentence, Mean, as_list
from choreo_agents.language.sentences import UNKNOWN, draw_distinct
from choreo_agents.language.tasks.base import Draft, draw_agents, up_to

SEARCH = "Agents call find and read results."
Search = list[tuple[str, int | None]]
"""Things searched for, in order, and the box each was found in."""


@dataclass(frozen=True)
class Trajectories:
    """Branches search for the same things in places of their own; one of them finds each thing, or none does."""

    branches: int = 3
    calls: int = 8
    """Of each branch: six tokens a call at most."""
    lost: float = 0.1
    """Share of things that nobody finds."""
    questions: int = 1
    short: bool = False
    """The branches come summarised instead of whole."""
    name: str = "trajectories"

    def draw(self, rng: random.Random) -> Problem:
        things = draw_distinct(rng, vocabulary.OBJECTS, self.calls)
        searches = draw_searches(rng, things, self.branches, self.lost)
        *agents, author = draw_agents(rng, self.branches + 1)
        draft = Draft(SEARCH)
        draft.add("problem", "user", f"Find {as_list(things)}.")
        words = [summary(search) if self.short else trajectory(search) for search in searches]
        draft.hear(list(zip(agents, words, strict=True)))
        gold: list[FirstSentence] = []
        for number in range(1, self.questions + 1):
            asked = rng.choice(things)
            box = next((box for search in searches for thing, box in search if thing == asked and box), None)
            answer = UNKNOWN if box is None else f"The {asked}: box {box}."
            draft.add(f"question {number}", "user", f"Where are the {asked}?")
            gold.append(FirstSentence(draft.say(f"answer {number}", answer, author), answer))
        return draft.done(self.name, " ".join(score.gold for score in gold), Mean(tuple(gold)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        calls = up_to(rng, 2, 10, hardness)
        branches, questions = up_to(rng, 1, 4, hardness), rng.randint(1, 4)
        return replace(self, branches=branches, calls=calls, questions=questions, short=rng.random() < 0.3)


@dataclass(frozen=True)
class Summary:
    """One branch says what its trajectory found."""

    calls: int = 8
    name: str = "summary"

    def draw(self, rng: random.Random) -> Problem:
        things = draw_distinct(rng, vocabulary.OBJECTS, self.calls)
        search = draw_searches(rng, things, rng.randint(1, 3), 0.1)[0]
        [agent] = draw_agents(rng, 1)
        draft = Draft(SEARCH)
        draft.add("problem", "user", f"Find {as_list(things)}.")
        draft.hear([(agent, trajectory(search))])
        draft.add("ask", "user", "Say what you found.")
        gold = summary(search)
        answer = draft.say("answer", gold, agent)
        return draft.done(self.name, gold, EachExact(((answer, gold),)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, calls=up_to(rng, 2, 10, hardness))


def draw_searches(rng: random.Random, things: list[str], branches: int, lost: float) -> list[Search]:
    """Each branch's search: who finds what, in which box, and in which order everybody looks."""
    found = {thing: (rng.randrange(branches), rng.randint(1, 40)) for thing in things if rng.random() >= lost}
    searches: list[Search] = []
    for branch in range(branches):
        order = rng.sample(things, len(things))
        searches.append(
            [(thing, found[thing][1] if thing in found and found[thing][0] == branch else None) for thing in order]
        )
    return searches


def trajectory(search: Search) -> str:
    """A call and its result for each thing."""
    return " ".join(f"Find {thing}: {f'box {box}' if box else 'none'}." for thing, box in search)


def summary(search: Search) -> str:
    """Only the calls that found something."""
    return trajectory([(thing, box) for thing, box in search if box]) or "Find none."
