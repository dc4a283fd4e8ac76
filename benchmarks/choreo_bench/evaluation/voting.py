"""Score of one sample, and of the vote over several: the least that a tree or a debate has to beat."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from choreo_agents.engine import Engine
from choreo_agents.sampling import Sampling
from choreo_agents.workflows.playing import at_once, room
from choreo_bench.evaluation.evaluate import LONGEST_ANSWER
from choreo_bench.evaluation.play import play
from choreo_bench.evaluation.score import Difference, Score
from choreo_bench.language import Problem, Split, Task, draw_problem
from choreo_bench.language.scoring import LastSentence, last_sentence


@dataclass(frozen=True)
class VoteResult:
    """Shares of problems that one sample, and the vote over all of them, get right."""

    single: Score
    """The first sample of each problem."""
    every: Score
    """Every sample of each problem; not independent within one."""
    vote: Score
    """The answer that most samples end with; the first of equals."""
    gain: Difference
    """The vote over the first sample."""


def sample_and_vote(
    engine: Engine,
    task: Task,
    *,
    count: int,
    samples: int = 8,
    temperature: float = 0.7,
    split: Split = "test",
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> VoteResult:
    """Sample each problem's answer several times and let the samples vote by their last sentence.

    For threads without a running event loop.

    Args:
        engine: Should prompt ordinarily (`baseline`).
        task: One whose problems leave one message to be said.
        count: Problems.
        samples: Of each problem.
        temperature: At which they are drawn.
        split: Which problems.
        seed: Of the first problem.
        on_progress: Called after every sample.

    Raises:
        ValueError: A problem leaves several messages to be said, or is not scored by its last sentence, or `count` or
            `samples` is below 1.
    """
    if count < 1 or samples < 1:
        raise ValueError(f"the numbers of problems and samples must be at least 1, not {count!r} and {samples!r}")
    problems = [draw_problem(task, split, number) for number in range(seed, seed + count)]
    answers = {message.name for problem in problems for message in problem.messages if message.is_answer}
    if len(answers) != 1:
        raise ValueError(f"{task.name!r} has several messages to answer, {sorted(answers)!r}: samples cannot vote")
    [answer] = answers
    if not all(isinstance(problem.scorer, LastSentence) for problem in problems):
        raise ValueError(f"the answer of {task.name!r} is not in one last sentence: samples cannot vote by it")
    sampling = Sampling(temperature=temperature, max_tokens=LONGEST_ANSWER)

    async def one(problem: Problem, number: int) -> str:
        texts = await play(engine, problem, sampling=sampling, seed=number)
        on_progress()
        return texts[answer]

    numbered = [(problem, (seed + i) * samples + k) for i, problem in enumerate(problems) for k in range(samples)]
    words = asyncio.run(at_once([partial(one, *pair) for pair in numbered], room(engine)))
    singles: list[bool] = []
    votes: list[bool] = []
    every = 0
    for index, problem in enumerate(problems):
        own = words[index * samples : (index + 1) * samples]
        right = [problem.score({answer: text}) >= 1.0 for text in own]
        every += sum(right)
        singles.append(right[0])
        elected = Counter(last_sentence(text) for text in own).most_common(1)[0][0]
        votes.append(problem.score({answer: elected}) >= 1.0)
    return VoteResult(
        single=Score(sum(singles), count),
        every=Score(every, count * samples),
        vote=Score(sum(votes), count),
        gain=Difference.of(votes, singles),
    )
