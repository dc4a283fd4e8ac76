"""Case of branch-solve-merge: scored by the share of the given concepts that the merged text covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of, methods
from choreo_agents.workflows.cases.answers import states


class Concepts(Item):
    """A writing task and the concepts that the text has to cover."""

    question: str = Field(min_length=1)
    concepts: tuple[str, ...] = Field(min_length=1)
    """Each is covered if it occurs in whole words."""

    @property
    def graded(self) -> bool:
        return True


class MergeOptions(Options):
    """Options: the number of parts and how the merger reads them."""

    branches: int = Field(default=2, ge=1, le=6, description="Parts.")
    strategy: Literal["parallel", "sequential", "text", "summary"] = Field(
        default="sequential", description="Placement in which the merger reads the parts from the cache."
    )


class MergeCase(Case):
    """A planner, one solver for each part of the plan, and a merger that writes the whole text."""

    name: ClassVar[str] = "branch_solve_merge"
    summary: ClassVar[str] = "A plan in parts, parallel solvers, and a merge (BSM)."
    options: ClassVar[type[Options]] = MergeOptions
    item: ClassVar[type[Item]] = Concepts
    variants = methods(serial={"strategy": "sequential"}, parallel={"strategy": "parallel"}, text={"strategy": "text"})
    scored: ClassVar[str] = "concepts covered"

    def play(self, item: Concepts, options: MergeOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.branch_solve_merge import branch_solve_merge

        graph = branch_solve_merge(
            [prompts("part", number=number) for number in range(1, options.branches + 1)],
            system=prompts("system"),
            plan=prompts("plan", parts=options.branches) or None,
            merge=prompts("merge"),
            strategy=options.strategy,
            speakers=prompts.names("speakers", 2),
            sampling=sampling,
        )
        return Play(graph, (("user", item.question),))

    def judge(self, item: Concepts, options: MergeOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        from choreo_agents.workflows.graphs.branch_solve_merge import MERGER, SOLVER

        story = answers_of(state, MERGER)[-1]
        covered = [concept for concept in item.concepts if states(story, concept, anywhere=True)]
        parts: dict[str, float] = {}
        for number, words in enumerate(answers_of(state, SOLVER), start=1):
            own = [concept in covered for concept in item.concepts if states(words, concept, anywhere=True)]
            if own:
                parts[f"of part {number}"] = sum(own) / len(own)
        return Result(story, len(covered) / len(item.concepts), parts)
