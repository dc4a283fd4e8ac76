"""Case of the tree of thoughts (ToT): scored by the answer that follows from the candidate with most votes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of
from choreo_agents.workflows.cases.answers import Question, read_answer

if TYPE_CHECKING:
    from choreo_agents.workflows.graphs.tree_of_thoughts import Ballot


class TreeOptions(Options):
    """Options: the size of the tree."""

    branches: int = Field(default=8, ge=1, description="Candidates that continue each thought that is kept.")
    voters: int = Field(default=4, ge=1, description="Votes on each level.")
    depth: int = Field(default=1, ge=1, description="Levels.")
    keep: int = Field(default=1, ge=1, description="Thoughts that are kept of each level.")


class TreeCase(Case):
    """A tree of candidate solutions from which voters choose."""

    name: ClassVar[str] = "tree_of_thoughts"
    summary: ClassVar[str] = "Candidates side by side, votes, and an answer from the best (ToT)."
    options: ClassVar[type[Options]] = TreeOptions
    item: ClassVar[type[Item]] = Question

    def play(self, item: Question, options: TreeOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.tree_of_thoughts import tree_of_thoughts

        graph = tree_of_thoughts(
            branches=options.branches,
            voters=options.voters,
            depth=options.depth,
            keep=options.keep,
            system=prompts("system"),
            think=prompts("think") or None,
            go_on=prompts("go_on") or None,
            vote=prompts("vote"),
            answer=prompts("final"),
            answer_prefix=prompts("answer_prefix"),
            ballot=ballot_of(prompts),
            speakers=prompts.names("speakers", 2),
            sampling=sampling,
        )
        return Play(graph, (("user", item.question),))

    def judge(self, item: Question, options: TreeOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        from choreo_agents.workflows.graphs.tree_of_thoughts import FINALIST, THINKER

        answer = read_answer(answers_of(state, FINALIST)[-1], prompts("answer"))
        scores = [item.score(read_answer(words, prompts("answer"))) for words in answers_of(state, THINKER)]
        right = [score for score in scores if score is not None]
        return Result(answer, item.score(answer), {"right candidates": sum(right) / len(right)} if right else {})


def ballot_of(prompts: Prompts) -> Ballot:
    """Return the function that spells a vote for a candidate: by its name or by its result, as the prompts say."""
    if prompts("ballot") not in ("value", "name"):
        raise ValueError(f"ballot in the prompts of {prompts.source} must be 'value' or 'name'")
    if prompts("ballot") == "name":
        return lambda name, _: f"{name}."

    def value(_: str, words: str) -> str | None:
        answer = read_answer(words, prompts("answer"))
        return f"{answer.removesuffix('.').split()[-1]}." if answer.endswith(".") and len(answer) > 1 else None

    return value
