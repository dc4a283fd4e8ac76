"""How often debates end in the right answer, per method, each decoding freely."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from choreo_agents.bench.debate import DebateSetting, hold
from choreo_agents.engine.methods import MethodName
from choreo_agents.models import LoadedModel
from choreo_agents.models.embedded.language import debate_problem


@dataclass(frozen=True)
class Score:
    """Right answers out of so many debates."""

    right: int
    count: int

    @property
    def share(self) -> float:
        return self.right / self.count

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share."""
        z, n, p = 1.96, self.count, self.share
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return middle - half, middle + half


@dataclass(frozen=True)
class Accuracy:
    """Scores of the final answers, and of the first agent's first answer."""

    final: Score
    first_answer: Score


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
    final = first = 0
    for number in range(seed, seed + count):
        problem = debate_problem(number, agents=agents)
        run = hold(DebateSetting(model, problem, rounds, seed=number), method)
        final += run.correct
        first += problem.is_correct(run.utterances[0].words)
        on_progress()
    return Accuracy(Score(final, count), Score(first, count))
