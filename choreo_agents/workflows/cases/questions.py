"""Questions with one answer."""

from __future__ import annotations

from pydantic import Field

from choreo_agents.workflows.case import Item
from choreo_agents.workflows.cases.answers import states


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
