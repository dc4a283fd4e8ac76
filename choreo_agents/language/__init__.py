"""The embedded language: plain English sentences in which the papers' phenomena can be posed and scored exactly."""

from __future__ import annotations

import random

from choreo_agents.language.problem import Message, Problem, Said, Scorer, Split, siblings
from choreo_agents.language.tasks import TASKS, Draft, Task

MOST_DRAWS = 10_000


def draw_problem(task: Task, split: Split, seed: int) -> Problem:
    """Draw the `seed`-th problem of a split; the same arguments draw the same problem, anywhere.

    A problem's own words say which split it belongs to, so that no problem is in two.

    Raises:
        ValueError: The task draws none of this split: it has too few different problems.
    """
    rng = random.Random(f"{task.name} {split} {seed}")
    for _ in range(MOST_DRAWS):
        problem = task.draw(rng)
        if problem.split == split:
            return problem
    raise ValueError(f"{task.name!r} drew {MOST_DRAWS} problems and none of them is of the {split!r} split")


__all__ = ["TASKS", "Draft", "Message", "Problem", "Said", "Scorer", "Split", "Task", "draw_problem", "siblings"]
