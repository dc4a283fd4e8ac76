"""Questions with one answer: sums from the embedded language, or the user's own."""

from __future__ import annotations

from pydantic import Field

from choreo_agents.lab.cases.answers import states
from choreo_agents.lab.language import Split, draw_problem
from choreo_agents.lab.language.tasks import Arithmetic
from choreo_agents.workflows.case import Item, Options


class Question(Item):
    """A question, and what is right if that is known."""

    question: str = Field(min_length=1)
    answer: str | None = None
    """The reply's answer has to say it in whole words."""

    @property
    def graded(self) -> bool:
        return self.answer is not None

    def score(self, answer: str) -> float | None:
        """1 if an answer is right, 0 if it is wrong, None if nobody knows."""
        return None if self.answer is None else float(states(answer, self.answer))


class SumOptions(Options):
    """How hard the sums are."""

    steps: int = Field(default=4, ge=1, le=8, description="Steps of a sum drawn from the embedded language.")


def draw_sum(options: SumOptions, split: Split, number: int) -> Question:
    """A sum in steps, and its result."""
    problem = draw_problem(Arithmetic(steps=options.steps), split, number)
    result = problem.gold.removesuffix(".").split()[-1]
    return Question(id=f"{split} {number}", question=problem.by_name["problem"].text, answer=result)
