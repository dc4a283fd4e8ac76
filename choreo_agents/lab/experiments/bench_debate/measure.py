"""How often debates end in the right answer, per method, each decoding freely."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from choreo_agents.engine.settings import MethodName
from choreo_agents.lab.evaluation import Difference, Score
from choreo_agents.lab.language.tasks.debate import DebateProblem
from choreo_agents.models import LoadedModel
from choreo_agents.workflows.debating import DebateSetting, hold


@dataclass(frozen=True)
class Accuracy:
    """Which debates went right: by the final answer, and by the first agent's first."""

    ended_right: tuple[bool, ...]
    began_right: tuple[bool, ...]

    @property
    def final(self) -> Score:
        """Of the final answers."""
        return Score(sum(self.ended_right), len(self.ended_right))

    @property
    def first_answer(self) -> Score:
        """Of the first agent's first answers."""
        return Score(sum(self.began_right), len(self.began_right))

    @property
    def gain(self) -> Difference:
        """Of the final answer over the first."""
        return Difference.of(self.ended_right, self.began_right)

    def over(self, other: Accuracy) -> Difference:
        """How much more often it ends right than another method in the same debates."""
        return Difference.of(self.ended_right, other.ended_right)


def score_debates(
    model: LoadedModel,
    method: MethodName,
    draw: Callable[[int], DebateProblem],
    *,
    count: int,
    rounds: int,
    seed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> Accuracy:
    """Hold the debates of seeds `seed` to `seed + count - 1` and look which answers are right.

    Args:
        model: Speaks for every agent.
        method: How the engine serves it.
        draw: Makes the problem of a seed.
        count: Debates.
        rounds: How often each agent speaks.
        seed: Of the first debate.
        on_progress: Called after each of them.
    """
    final: list[bool] = []
    first: list[bool] = []
    for number in range(seed, seed + count):
        problem = draw(number)
        run = hold(DebateSetting(model, problem, rounds, seed=number), method)
        final.append(run.correct)
        first.append(problem.is_correct(run.utterances[0].words))
        on_progress()
    return Accuracy(tuple(final), tuple(first))
