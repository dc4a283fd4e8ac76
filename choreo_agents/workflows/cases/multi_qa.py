"""Case of MultiQA: scored by whether one reply answers all questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of, methods
from choreo_agents.workflows.cases.answers import states


class Questions(Item):
    """Questions that are encoded apart, and their right answers."""

    questions: tuple[str, ...] = Field(min_length=1)
    answers: tuple[str, ...] = ()
    """The right answer to each question; empty if they are unknown."""
    notes: str | None = None
    """The answerer's private system prompt."""

    @property
    def graded(self) -> bool:
        return bool(self.answers)

    @model_validator(mode="after")
    def _require_answers(self) -> Self:
        if self.answers and len(self.answers) != len(self.questions):
            raise ValueError(f"got {len(self.questions)} questions, but {len(self.answers)} answers")
        return self


class QuestionsOptions(Options):
    """Options: the positions of the questions."""

    layout: Literal["serial", "parallel"] = Field(default="parallel", description="Placement of the questions.")


class MultiQACase(Case):
    """Questions that are encoded apart and answered in one reply."""

    name: ClassVar[str] = "multi_qa"
    summary: ClassVar[str] = "Separate questions, answered in one reply (MultiQA)."
    options: ClassVar[type[Options]] = QuestionsOptions
    item: ClassVar[type[Item]] = Questions
    variants = methods(serial={"layout": "serial"}, parallel={"layout": "parallel"})
    scored: ClassVar[str] = "all right"

    def play(self, item: Questions, options: QuestionsOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.multi_qa import multi_qa

        graph = multi_qa(
            item.questions,
            layout=options.layout,
            system=prompts("system"),
            notes=item.notes,
            prompt=prompts("asked") or None,
            speaker=prompts("speaker"),
            sampling=sampling,
        )
        return Play(graph)

    def judge(self, item: Questions, options: QuestionsOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        from choreo_agents.workflows.graphs.multi_qa import ANSWERER

        reply = answers_of(state, ANSWERER)[-1]
        right = [float(states(reply, answer, anywhere=True)) for answer in item.answers]
        parts = {f"question {number}": score for number, score in enumerate(right, start=1)}
        return Result(reply, float(all(right)) if right else None, parts)
