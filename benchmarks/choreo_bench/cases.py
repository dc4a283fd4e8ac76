"""The workflows on problems of the embedded language: any number of them, as hard as is asked for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field

from choreo_agents.workflows import cases
from choreo_agents.workflows.cases import Case, Concepts, DebateItem, Item, Options, Question, Questions, Stakes
from choreo_bench.language import Split, draw_problem
from choreo_bench.language.problem import split_of
from choreo_bench.language.scoring import sentences
from choreo_bench.language.tasks import Arithmetic, BranchSolveMerge, SeveralQuestions
from choreo_bench.language.tasks.debate import debate_problem
from choreo_bench.language.tasks.dilemma import GAME

STRATEGY_NAMES: tuple[cases.Strategy, ...] = ("free", "cooperate", "defect")


class DrawnCase(Case, Protocol):
    """A workflow whose items are drawn."""

    def draw(self, options: Any, split: Split, number: int) -> Item:
        """Draw an item; the same arguments draw the same one, and no two splits share one."""
        ...


class SumOptions(Options):
    """Options of sums: how hard they are."""

    steps: int = Field(default=4, ge=1, le=8, description="Steps of a sum.")


class DirectOptions(SumOptions):
    """Options of a single call: what it is asked."""

    task: Literal["sums", "notes"] = Field(
        default="sums", description="Problem: a sum, or the first question of a debate's first agent."
    )


class SumDebateOptions(SumOptions, cases.IterativeDebateOptions):
    """Options of a debate about a sum."""


class SumTreeOptions(SumOptions, cases.TreeOptions):
    """Options of a tree about a sum."""


class DrawnMergeOptions(cases.MergeOptions):
    """Options of a story in parts that are drawn."""

    size: int = Field(default=3, ge=1, description="Concepts of each part.")


class DrawnQuestionsOptions(cases.QuestionsOptions):
    """Options of questions that are drawn."""

    questions: int = Field(default=2, ge=1, description="Number of questions.")
    facts: int = Field(default=6, ge=1, description="Facts in the answerer's notes.")
    both_orders: bool = Field(
        default=False,
        description="Whether each problem becomes two items, with its questions in either order: for training, where "
        "parallel questions have no order.",
    )


class DrawnDilemmaOptions(cases.DilemmaOptions):
    """Options of games that are drawn."""

    every_strategy: bool = Field(
        default=False, description="Whether Alice gets each strategy in turn, whatever --alice is: for training."
    )


class DrawnDebate(cases.DebateCase):
    """A debate over notes alone."""

    def draw(self, options: cases.DebateOptions, split: Split, number: int) -> DebateItem:
        problem = debate_problem(number, agents=options.agents, split=split)
        return DebateItem(id=f"{split} {number}", question=problem.question, answer=problem.answer, notes=problem.notes)


class DrawnDirect(cases.DirectCase):
    """A single call, on the questions of the other workflows."""

    options: ClassVar[type[Options]] = DirectOptions

    def draw(self, options: DirectOptions, split: Split, number: int) -> DebateItem:
        if options.task == "notes":
            return DrawnDebate().draw(cases.DebateOptions(), split, number)
        return DebateItem(**draw_sum(options, split, number).model_dump())


class DrawnIterativeDebate(cases.IterativeDebateCase):
    """A debate in turns about a sum."""

    options: ClassVar[type[Options]] = SumDebateOptions

    def draw(self, options: SumDebateOptions, split: Split, number: int) -> Question:
        return draw_sum(options, split, number)


class DrawnTree(cases.TreeCase):
    """A tree of thoughts about a sum."""

    options: ClassVar[type[Options]] = SumTreeOptions

    def draw(self, options: SumTreeOptions, split: Split, number: int) -> Question:
        return draw_sum(options, split, number)


class DrawnMerge(cases.MergeCase):
    """A story in parts."""

    options: ClassVar[type[Options]] = DrawnMergeOptions

    def draw(self, options: DrawnMergeOptions, split: Split, number: int) -> Concepts:
        problem = draw_problem(BranchSolveMerge(branches=options.branches, size=options.size), split, number)
        concepts = tuple(sentence.strip() for sentence in problem.gold.split(".") if sentence.strip())
        return Concepts(id=f"{split} {number}", question=problem.by_name["problem"].text, concepts=concepts)


class DrawnMultiQA(cases.MultiQACase):
    """Questions about notes."""

    options: ClassVar[type[Options]] = DrawnQuestionsOptions

    def draw(self, options: DrawnQuestionsOptions, split: Split, number: int) -> Questions:
        task = SeveralQuestions(questions=options.questions, facts=max(options.facts, options.questions))
        problem = draw_problem(task, split, number // 2 if options.both_orders else number)
        questions = tuple(m.text for m in problem.messages if m.name.startswith("question"))
        answers = tuple(sentences(problem.gold)) if problem.gold else ()
        notes = problem.by_name["notes"].text
        if options.both_orders and number % 2:
            questions, answers = questions[::-1], answers[::-1]
        return Questions(id=f"{split} {number}", questions=questions, answers=answers, notes=notes)


class DrawnDilemma(cases.DilemmaCase):
    """A game whose points are drawn."""

    options: ClassVar[type[Options]] = DrawnDilemmaOptions

    def draw(self, options: DrawnDilemmaOptions, split: Split, number: int) -> Stakes:
        both, none = stakes(split, number)
        # In turn, and with either player first.
        strategy = STRATEGY_NAMES[number // 2 % len(STRATEGY_NAMES)] if options.every_strategy else None
        return Stakes(id=f"{split} {number}", both=both, none=none, bob_first=bool(number % 2), alice=strategy)


_ALL: tuple[DrawnCase, ...] = (
    DrawnDebate(),
    DrawnDirect(),
    DrawnIterativeDebate(),
    DrawnTree(),
    DrawnMerge(),
    DrawnMultiQA(),
    DrawnDilemma(),
)
CASES: Mapping[str, DrawnCase] = {case.name: case for case in _ALL}
"""Every workflow, by its function's name."""


def draw_sum(options: SumOptions, split: Split, number: int) -> Question:
    """Draw a sum in steps, with its result."""
    problem = draw_problem(Arithmetic(steps=options.steps), split, number)
    result = problem.gold.removesuffix(".").split()[-1]
    return Question(id=f"{split} {number}", question=problem.by_name["problem"].text, answer=result)


def stakes(split: Split, number: int) -> tuple[int, int]:
    """Draw the points of a game if both cooperate, and if both defect: no two splits share a game."""
    rng = random.Random(f"dilemma {split} {number}")
    while True:
        none, both = sorted(rng.sample(range(2, 61), 2))
        if split_of([GAME.format(both=both, none=none)]) == split:
            return both, none
