"""Sweeps over what Parallel-Synthesis leaves open: the number of branches, their length, and their order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.experiments.eval_synthesis.contenders import Contender
from choreo_bench.experiments.eval_synthesis.measure import AskedTask
from choreo_bench.language import Problem
from choreo_bench.language.synthesis import SYNTHESIS_TASKS, Synthesis, SynthesisTask

BRANCHES = (2, 4, 8, 16)
LENGTHS = (1, 2, 4, 8)
ORDERS = 3
"""Random orders of the same branches."""
SWEPT = (Contender("text"), Contender("full", "parallel"), Contender("full", "sequential"))


@dataclass(frozen=True)
class Shuffled:
    """A task whose branches come in another order: the same problems, differently told."""

    task: SynthesisTask
    order: int

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def branches(self) -> int:
        return self.task.branches

    @property
    def most_branches(self) -> int:
        return self.task.most_branches

    def draw(self, rng: random.Random) -> Problem:
        problem = self.task.draw(rng)
        order = list(problem.branches)
        told = sorted(message.text for message in problem.messages)
        random.Random(f"order {self.order} {told}").shuffle(order)
        place = dict(zip(problem.branches, order, strict=True))
        # Whoever saw the branches sees them in the new order; nothing else changes.
        seen = [
            replace(message, parents=tuple(place.get(parent, parent) for parent in message.parents))
            if set(problem.branches) <= set(message.parents)
            else message
            for message in problem.messages
        ]
        return replace(problem, messages=tuple(seen), branches=tuple(order))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, task=self.task.varied(rng, hardness))

    def with_branches(self, branches: int) -> Self:
        return replace(self, task=self.task.with_branches(branches))


def by_branches() -> dict[int, list[AskedTask]]:
    """Every task with so many branches, as far as it has words for them."""
    return {
        count: [
            AskedTask(f"{name} of {count}", task.with_branches(count))
            for name, task in SYNTHESIS_TASKS.items()
            if count <= task.most_branches
        ]
        for count in BRANCHES
    }


def by_length() -> dict[int, list[AskedTask]]:
    """Tasks whose branches may be longer, with four of them."""
    tasks = [task for task in SYNTHESIS_TASKS.values() if isinstance(task, Synthesis) and task.lengths[1] > 1]
    return {
        length: [
            AskedTask(f"{task.name} of length {length}", replace(task, branches=4, length=length)) for task in tasks
        ]
        for length in LENGTHS
    }


def by_order() -> dict[int, list[AskedTask]]:
    """Every task, its branches in their own order and in random ones."""
    usual = {0: [AskedTask(name, task) for name, task in SYNTHESIS_TASKS.items()]}
    return usual | {
        order: [AskedTask(f"{name} in order {order}", Shuffled(task, order)) for name, task in SYNTHESIS_TASKS.items()]
        for order in range(1, ORDERS + 1)
    }


def changed(one: Sequence[Iterable[float]]) -> float:
    """The share of problems whose verdict is not the same in all orders."""
    verdicts = list(zip(*one, strict=True))
    return sum(len(set(each)) > 1 for each in verdicts) / len(verdicts)
