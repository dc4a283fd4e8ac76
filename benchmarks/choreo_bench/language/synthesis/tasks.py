"""The synthesis tasks: workers with notes of their own speak side by side; the answer takes what all of them say."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem, ProblemMessage, siblings
from choreo_bench.language.synthesis.notes import Told, own_words, with_notes
from choreo_bench.language.synthesis.spoken import SpokenHops, SpokenParts, SpokenReports
from choreo_bench.language.tasks import (
    BestSupported,
    Choose,
    Conflict,
    Diagnosis,
    ListUnion,
    MajorityVote,
    SumOfParts,
    Task,
    Trajectories,
)
from choreo_bench.language.tasks.base import AsksSeveral, up_to

MOST_IN_TRAINING = 8
"""Branches."""
LONGEST_MERGE = 18
"""Sentences that a merged text has at most: an answer of 96 tokens holds them."""


@runtime_checkable
class SynthesisTask(Task, Protocol):
    """A task whose problems have branches (see `Parts`), as many as it is asked for."""

    @property
    def branches(self) -> int:
        """Workers."""
        ...

    @property
    def most_branches(self) -> int:
        """Up to which there are enough words."""
        ...

    def with_branches(self, branches: int) -> Self:
        """The same task with another number of workers, 2 to `most_branches`."""
        ...


@dataclass(frozen=True)
class Synthesis:
    """Another task, each of whose speakers is a worker with a private context of its own length."""

    name: str
    words: Callable[[int, int], Task]
    """The task that has this many workers and branches of this length."""
    branches: int = 4
    length: int = 1
    """Of a branch: facts, things, calls or steps; fewer where so many branches leave no words for more."""
    lengths: tuple[int, int] = (1, 1)
    """Least and most in training; a task with no others has branches that say one thing only."""
    private: int = 5
    """Facts in the longest notes; each worker has 0 to so many, and none without notes."""
    most_branches: int = 16
    required: Told = own_words

    def __post_init__(self) -> None:
        if not 2 <= self.branches <= self.most_branches:
            raise ValueError(f"{self.name!r} has 2 to {self.most_branches} branches, not {self.branches!r}")
        if self.length < 1 or (self.length > 1 and self.lengths == (1, 1)):
            raise ValueError(f"{self.name!r} has no branches of {self.length!r}: use one of {self.lengths!r}")
        if self.private < 0:
            raise ValueError(f"notes cannot have {self.private!r} facts")

    def draw(self, rng: random.Random) -> Problem:
        return self.draw_several(rng, 1)[0]

    def draw_several(self, rng: random.Random, questions: int) -> list[Problem]:
        """Draw several problems with the same messages (see `AsksSeveral`); only one if the task has no others."""
        task = self.words(self.branches, self.length)
        first, *others = task.draw_several(rng, questions) if isinstance(task, AsksSeveral) else [task.draw(rng)]
        view = first.messages[-1].parents
        [branches] = [group for group in siblings(first, view) if len(group) > 1]
        noted = replace(with_notes(rng, first, branches, self.required, self.private), task=self.name)
        return [noted, *(_asked_instead(noted, other) for other in others)]

    def varied(self, rng: random.Random, hardness: float) -> Self:
        branches = up_to(rng, 2, min(MOST_IN_TRAINING, self.most_branches), hardness)
        length = up_to(rng, *self.lengths, hardness)
        return replace(self, branches=branches, length=length, private=rng.choice((0, 2, 5, 5)))

    def with_branches(self, branches: int) -> Self:
        """Return the task with another number of branches (see the base class)."""
        return replace(self, branches=branches)


def _asked_instead(noted: Problem, other: Problem) -> Problem:
    """The question and answer of one problem in another, which has the same messages before them, and notes."""
    key = tuple(message.text for message in other.messages if not message.is_answer)
    messages = (*noted.messages[:-2], *other.messages[-2:])
    return replace(noted, messages=messages, gold=other.gold, scorer=other.scorer, key=key)


def _largest(branches: int) -> int:
    """Return the largest number of a task whose numbers start at 2 and are all different."""
    return 12 if branches <= 8 else 20


def _vote(branches: int, _length: int) -> Task:
    return MajorityVote(voters=branches)


def _best(branches: int, _length: int) -> Task:
    return BestSupported(candidates=branches, largest=_largest(branches))


def _trust(branches: int, _length: int) -> Task:
    return Conflict(reports=branches, largest=_largest(branches))


def _union(branches: int, length: int) -> Task:
    return ListUnion(workers=branches, items=length, kinds=max(10, length + 1))


def _sum(branches: int, _length: int) -> Task:
    # Sums that the language has words for, and mostly such as are added in its own tasks.
    return SumOfParts(workers=branches, largest=max(3, min(9, 36 // branches)))


def _hops(branches: int, length: int) -> Task:
    return SpokenHops(branches, min(length, len(vocabulary.PEOPLE) // (branches + 1)))


def _assembly(branches: int, length: int) -> Task:
    return SpokenParts(branches, min(length, LONGEST_MERGE // branches))


def _searches(branches: int, length: int) -> Task:
    return Trajectories(branches=branches, calls=min(length, len(vocabulary.OBJECTS) // branches))


def _monitors(branches: int, length: int) -> Task:
    # Two gauges have no more pairs that are out of range.
    return Diagnosis(gauges=branches, rules=4)


def _candidates(branches: int, length: int) -> Task:
    return Choose(candidates=branches, steps=length)


def _reports(branches: int, length: int) -> Task:
    return SpokenReports(branches, min(length, 3 * len(vocabulary.PEOPLE) // branches))


def _whose(problem: Problem, words: ProblemMessage) -> list[str]:
    """Turn a worker's text into a fact about the person who is asked about."""
    person = problem.by_name["problem"].text.split()[2]
    return [f"{person} has {words.text}"]


_ALL = (
    Synthesis("vote", _vote, branches=8),
    Synthesis("best", _best, branches=8),
    Synthesis("trust", _trust, branches=6, required=_whose),
    Synthesis("union", _union, length=3, lengths=(1, 4)),
    Synthesis("sum", _sum),
    Synthesis("hops", _hops, length=3, lengths=(1, 4)),
    Synthesis("assembly", _assembly, branches=6, length=2, lengths=(1, 3)),
    Synthesis("searches", _searches, length=7, lengths=(2, 10)),
    Synthesis("monitors", _monitors, branches=6, most_branches=len(vocabulary.GAUGES)),
    Synthesis("candidates", _candidates, branches=8, length=3, lengths=(1, 4)),
    Synthesis("reports", _reports, branches=8, length=8, lengths=(2, 10)),
)
SYNTHESIS_TASKS: Mapping[str, SynthesisTask] = {task.name: task for task in _ALL}
"""Every synthesis task at its default difficulty, by name."""
HELD_OUT = "reports"
"""The task that no synthesizer is trained on: a look-up in branches that are longer than any other task's."""
FROM_TRUNK = ("assembly", "candidates")
"""Tasks whose answer follows from the trunk alone: branches can mislead there, but need not be read."""
