"""Scores synthesis tasks: many problems at once, every problem's score kept, so that two ways compare in pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from choreo_agents.engine import Engine
from choreo_agents.sampling import Sampling
from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.workflows.playing import at_once, room
from choreo_bench.evaluation.evaluate import GREEDY
from choreo_bench.evaluation.merging import Workers, play_synthesis
from choreo_bench.evaluation.score import Score
from choreo_bench.language import Split, draw_problem
from choreo_bench.language.synthesis import Parts, SynthesisTask


@dataclass(frozen=True)
class SynthesisRecord:
    """Result of one problem."""

    task: str
    number: int
    """The problem's seed: the same number is the same problem, however it is played."""
    score: float
    """The share of the answer that is right, 0 to 1."""
    answer: str
    workers: tuple[bool, ...] = ()
    """Of each branch that its worker really said: whether it said what would be right."""

    @property
    def solved(self) -> bool:
        """True if all of the answer is right."""
        return self.score >= 1.0


def evaluate_synthesis(
    engine: Engine,
    tasks: Iterable[SynthesisTask],
    *,
    count: int,
    split: Split = "test",
    layout: SynthesisLayout = "sequential",
    workers: Workers = "given",
    adapter: str | None = None,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[SynthesisRecord]:
    """Play `count` problems of each task; for threads without a running event loop.

    Args:
        engine: Its method decides whether the answer is made from caches (`choreo`) or from text.
        tasks: At the difficulty, and with the number of branches, that they are to be played at.
        count: Problems of each task: those of seeds `seed` to `seed + count - 1`.
        split: Which problems.
        layout: Where branches appear; `workers`, `adapter` and `sampling` as for `play_synthesis`.
        workers: See there.
        adapter: See there.
        sampling: See there.
        seed: Of the first problem.
        on_progress: Called with the task's name after every problem.

    Returns:
        The records, task by task, in the order of their seeds.

    Raises:
        ValueError: `count` is below 1, or see `play_synthesis`.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be at least 1, not {count!r}")

    async def one(task: SynthesisTask, number: int) -> SynthesisRecord:
        problem = draw_problem(task, split, number)
        merged = await play_synthesis(
            engine,
            problem,
            sampling=sampling,
            layout=layout,
            workers=workers,
            adapter=adapter,
            seed=number,
        )
        on_progress(task.name)
        words = [branch.words for branch in Parts.of(problem).branches if branch.words.name in merged.texts]
        return SynthesisRecord(
            task.name,
            number,
            problem.score(merged.texts),
            merged.texts[Parts.of(problem).answer.name],
            tuple(merged.texts[own.name] == own.text for own in words),
        )

    jobs = [partial(one, task, number) for task in tasks for number in range(seed, seed + count)]
    return asyncio.run(at_once(jobs, room(engine)))


def solved_by_task(records: Sequence[SynthesisRecord]) -> dict[str, Score]:
    """Count the solved problems of each task."""
    names = dict.fromkeys(record.task for record in records)
    of = {name: [record.solved for record in records if record.task == name] for name in names}
    return {name: Score(sum(solved), len(solved)) for name, solved in of.items()}
