"""The embedded language: plain English sentences in which the papers' phenomena can be posed and scored exactly."""

from __future__ import annotations

import random

from choreo_bench.language.problem import Problem, ProblemMessage, Said, Scorer, Split, siblings
from choreo_bench.language.tasks import TASKS, Draft, Task
from choreo_bench.language.tasks.base import AsksSeveral

MOST_DRAWS = 10_000


def draw_problem(task: Task, split: Split, seed: int) -> Problem:
    """Draw the `seed`-th problem of a split; the same arguments draw the same problem, anywhere.

    A problem's own words say which split it belongs to, so that no problem is in two.

    Raises:
        ValueError: The task draws none of this split: it has too few different problems.
    """
    return draw_problems(task, split, seed)[0]


def draw_problems(task: Task, split: Split, seed: int, questions: int = 1) -> list[Problem]:
    """Draw a problem, and others with the same messages and other questions, as far as the task has them.

    All are of the split. Which problem comes first may depend on how many are asked for.

    Raises:
        ValueError: As for `draw_problem`.
    """
    rng = random.Random(f"{task.name} {split} {seed}")
    for _ in range(MOST_DRAWS):
        first, *others = task.draw_several(rng, questions) if isinstance(task, AsksSeveral) else [task.draw(rng)]
        if first.split == split:
            return [first, *(other for other in others if other.split == split)]
    raise ValueError(f"none of {MOST_DRAWS} generated problems of {task.name!r} is in the {split!r} split")


__all__ = [
    "TASKS",
    "AsksSeveral",
    "Draft",
    "Problem",
    "ProblemMessage",
    "Said",
    "Scorer",
    "Split",
    "Task",
    "draw_problem",
    "draw_problems",
    "siblings",
]
