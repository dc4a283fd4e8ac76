"""Putting parts together: branch-solve-merge, the union of lists, the sum of parts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import Coverage, LastSentence, SameItems, as_list
from choreo_bench.language.sentences import draw_distinct
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to


@dataclass(frozen=True)
class BranchSolveMerge:
    """Split what is to be written about, write about each part apart, and merge what was written."""

    branches: int = 3
    size: int = 2
    """People, each with a thing, in each part."""
    name: str = "branch_solve_merge"

    def draw(self, rng: random.Random) -> Problem:
        count = self.branches * self.size
        people = draw_distinct(rng, vocabulary.PEOPLE, count)
        things = [f"{rng.choice(vocabulary.COLORS)} {kind}" for kind in draw_distinct(rng, vocabulary.OBJECTS, count)]
        concepts = [f"{person} with {thing}" for person, thing in zip(people, things, strict=True)]
        planner, merger, *solvers = draw_agents(rng, 2 + self.branches)
        draft = Draft("Work in parts.")
        draft.add("problem", "user", f"Write about {', '.join(concepts)} in parts of {self.size}.")
        starts = range(0, count, self.size)
        plan = " ".join(
            f"Part {number}: {', '.join(concepts[start : start + self.size])}."
            for number, start in enumerate(starts, start=1)
        )
        draft.say("plan", plan, planner)
        planned = draft.names
        written: list[str] = []
        for number, (start, solver) in enumerate(zip(starts, solvers, strict=True), start=1):
            task = draft.add(f"part {number}", "user", f"Write part {number}.", sees=planned)
            words = " ".join(f"{people[index]} has {things[index]}." for index in range(start, start + self.size))
            written.append(draft.say(f"branch {number}", words, solver, sees=[*planned, task]))
        draft.add("ask", "user", "Write all parts again.", sees=[*planned, *written])
        story = " ".join(draft.text(name) for name in written)
        merged = draft.say("merged", story, merger, sees=[*planned, *written, "ask"])
        return draft.done(
            self.name, story, Coverage(merged, tuple(written), frozenset(zip(people, things, strict=True)))
        )

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, branches=up_to(rng, 2, 4, hardness), size=rng.choice((1, 2, 2, 3)))


@dataclass(frozen=True)
class ListUnion:
    """Workers list what they see; the union names everything once, in alphabetical order."""

    workers: int = 3
    items: int = 3
    """In each list."""
    kinds: int = 8
    """Things there are to see: the fewer, the more the lists overlap."""
    name: str = "list_union"

    def draw(self, rng: random.Random) -> Problem:
        kinds = draw_distinct(rng, vocabulary.OBJECTS, self.kinds)
        lists = [rng.sample(kinds, self.items) for _ in range(self.workers)]
        *workers, author = draw_agents(rng, self.workers + 1)
        draft = Draft("Say what you see.")
        draft.add("problem", "user", "What do you see?")
        draft.hear([(worker, f"I see {as_list(seen)}.") for worker, seen in zip(workers, lists, strict=True)])
        draft.add("ask", "user", "What do we all see, in order?")
        union = sorted({thing for seen in lists for thing in seen})
        gold = f"We see {', '.join(union)}."
        answer = draft.say("answer", gold, author)
        return draft.done(self.name, gold, SameItems(answer, frozenset(union), "We see"))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        items = rng.randint(1, 4)
        return replace(self, workers=up_to(rng, 1, 4, hardness), items=items, kinds=rng.randint(items + 1, 10))


@dataclass(frozen=True)
class SumOfParts:
    """Workers say how many they have; the sum is worked out in sentences."""

    workers: int = 3
    largest: int = 9
    """Of one worker's number."""
    name: str = "sum_of_parts"

    def draw(self, rng: random.Random) -> Problem:
        [thing] = draw_distinct(rng, vocabulary.OBJECTS, 1)
        numbers = [rng.randint(2, self.largest) for _ in range(self.workers)]
        *workers, author = draw_agents(rng, self.workers + 1)
        draft = Draft("Say what you have.")
        draft.add("problem", "user", f"How many {thing} do you have?")
        draft.hear([(worker, f"I have {number} {thing}.") for worker, number in zip(workers, numbers, strict=True)])
        draft.add("ask", "user", f"How many {thing} do we have?")
        steps, total = [], numbers[0]
        for number in numbers[1:]:
            steps.append(f"{total} and {number} make {total + number}.")
            total += number
        gold = f"We have {total} {thing}."
        answer = draft.say("answer", " ".join([*steps, gold]), author)
        return draft.done(self.name, gold, LastSentence(answer, gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, workers=up_to(rng, 2, 4, hardness), largest=rng.choice((5, 9, 9)))
