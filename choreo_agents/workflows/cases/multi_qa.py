"""MultiQA: how many of the questions one reply answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from choreo_agents.workflows.case import (
    METHODS,
    Case,
    Item,
    Options,
    Play,
    Prompts,
    Result,
    Sampling,
    Variant,
    answers_of,
)
from choreo_agents.workflows.cases.answers import states


class Questions(Item):
    """Questions that are asked apart."""

    questions: tuple[str, ...] = Field(min_length=1)
    answers: tuple[str, ...] = ()
    """What is right, question by question; none if nobody knows."""
    notes: str | None = None
    """What the answerer knows: its private system prompt."""

    @property
    def graded(self) -> bool:
        return bool(self.answers)

    @model_validator(mode="after")
    def _one_answer_each(self) -> Self:
        if self.answers and len(self.answers) != len(self.questions):
            raise ValueError(f"there are {len(self.questions)} questions and {len(self.answers)} answers")
        return self


class QuestionsOptions(Options):
    """Where the questions stand."""

    layout: Literal["serial", "parallel"] = Field(default="parallel", description="Where choreo places the questions.")


class MultiQACase(Case):
    """Questions encoded apart, one reply."""

    name: ClassVar[str] = "multi_qa"
    summary: ClassVar[str] = "Questions asked apart and answered in one reply (MultiQA)."
    options: ClassVar[type[Options]] = QuestionsOptions
    item: ClassVar[type[Item]] = Questions
    variants: ClassVar[Mapping[str, Variant]] = {
        **METHODS,
        "serial": Variant("choreo", {"layout": "serial"}),
        "parallel": Variant("choreo", {"layout": "parallel"}),
    }
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
        parts = {f"question {number}": each for number, each in enumerate(right, start=1)}
        return Result(reply, float(all(right)) if right else None, parts)
