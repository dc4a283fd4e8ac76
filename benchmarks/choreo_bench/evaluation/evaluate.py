"""Scores tasks on an engine: many problems at once, so that they share its steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from choreo_agents.engine import Engine
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.playing import at_once, room
from choreo_bench.evaluation.play import Layout, play
from choreo_bench.evaluation.score import Score
from choreo_bench.language import Problem, Said, Split, Task, draw_problem

LONGEST_ANSWER = 96
"""Tokens."""

GREEDY = Sampling(temperature=0.0, max_tokens=LONGEST_ANSWER)

OnProgress = Callable[[str], None]


@runtime_checkable
class Parses(Protocol):
    """A scorer that also tells whether an answer can be read at all."""

    def parsable(self, answers: Said) -> bool:
        """Return whether the answer, right or wrong, states something."""
        ...


@dataclass(frozen=True)
class TaskResult:
    """Result of a task."""

    solved: Score
    """Problems of which everything is right."""
    share_right: float
    """Mean share of an answer that is right."""
    parsable: Score | None
    """Answers that state something at all, where the task tells."""


@dataclass(frozen=True)
class Evaluation:
    """Results by task."""

    results: Mapping[str, TaskResult]


def evaluate(
    engine: Engine,
    tasks: Iterable[Task],
    *,
    count: int,
    split: Split = "test",
    layout: Layout = "sequential",
    sampling: Sampling = GREEDY,
    seed: int = 0,
    on_progress: OnProgress = lambda _: None,
) -> Evaluation:
    """Play `count` problems of each task and score them; for threads without a running event loop.

    Args:
        engine: Its method decides whether messages come from the cache (`choreo`) or from text (`baseline`, `naive`).
        tasks: At the difficulty that they are to be played at.
        count: Problems of each task: those of seeds `seed` to `seed + count - 1`.
        split: Which problems.
        layout: Where messages appear in views.
        sampling: How tokens are chosen.
        seed: Of the first problem.
        on_progress: Called with the task's name after every problem.

    Raises:
        ValueError: `count` is below 1, two tasks have one name, or a task has no such problems.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be at least 1, not {count!r}")
    tasks = list(tasks)
    twice = [name for name, times in Counter(task.name for task in tasks).items() if times > 1]
    if twice:
        raise ValueError(f"several tasks are named {twice[0]!r}: use different names")

    async def one(task: Task, number: int) -> tuple[float, bool | None]:
        problem = draw_problem(task, split, number)
        answers = await play(engine, problem, sampling=sampling, layout=layout, seed=number)
        on_progress(task.name)
        return problem.score(answers), parsable(problem, answers)

    results: dict[str, TaskResult] = {}
    for task in tasks:
        jobs = [partial(one, task, number) for number in range(seed, seed + count)]
        played = asyncio.run(at_once(jobs, room(engine)))
        results[task.name] = _result([score for score, _ in played], [reads for _, reads in played])
    return Evaluation(results)


def parsable(problem: Problem, answers: Said) -> bool | None:
    """Return whether an answer can be parsed; None if the problem's scorer cannot tell."""
    return problem.scorer.parsable(answers) if isinstance(problem.scorer, Parses) else None


def _result(scores: list[float], reads: list[bool | None]) -> TaskResult:
    known = [readable for readable in reads if readable is not None]
    return TaskResult(
        solved=Score(sum(score >= 1.0 for score in scores), len(scores)),
        share_right=sum(scores) / len(scores),
        parsable=Score(sum(known), len(known)) if known else None,
    )
