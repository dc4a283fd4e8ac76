"""How often debates end in the right answer, per method, each decoding freely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from choreo_agents.bench.debate import DebateSetting, hold
from choreo_agents.engine.methods import MethodName
from choreo_agents.evaluation import Difference, Score
from choreo_agents.language.tasks.debate import debate_problem
from choreo_agents.models import LoadedModel


@dataclass(frozen=True)
class Accuracy:
    """Scores of the final answers, and of the first agent's first answer."""

    final: Score
    first_answer: Score
    gain: Difference
    """Of the final answer over the first."""


def score_debates(
    model: LoadedModel,
    method: MethodName,
    *,
    count: int,
    agents: int,
    rounds: int,
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Hold the debates of seeds `seed` to `seed + count - 1` and count right answers."""
    final: list[bool] = []
    first: list[bool] = []
    for number in range(seed, seed + count):
        problem = debate_problem(number, agents=agents)
        run = hold(DebateSetting(model, problem, rounds, seed=number), method)
        final.append(run.correct)
        first.append(problem.is_correct(run.utterances[0].words))
        on_progress()
    return Accuracy(Score(sum(final), count), Score(sum(first), count), Difference.of(final, first))
