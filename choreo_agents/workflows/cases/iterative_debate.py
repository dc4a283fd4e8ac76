"""Case of the debate in turns (MADiter): scored by the moderator's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of
from choreo_agents.workflows.cases.answers import Question, read_answer


class IterativeDebateOptions(Options):
    """Options: the number of rounds."""

    rounds: int = Field(default=3, ge=1, description="Most rounds; the moderator may end earlier.")


class IterativeDebateCase(Case):
    """A debate in which one side answers, the other checks, and a moderator names the result or asks to go on."""

    name: ClassVar[str] = "iterative_debate"
    summary: ClassVar[str] = "Two sides speak in turns until a moderator ends it (MADiter)."
    options: ClassVar[type[Options]] = IterativeDebateOptions
    item: ClassVar[type[Item]] = Question

    def play(self, item: Question, options: IterativeDebateOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.iterative_debate import ROLES, Role, iterative_debate

        named = zip(ROLES, prompts.names("speakers", 3, 3), strict=True)
        roles = {name: Role(who, prompts(name) or None, prompts(f"{name}_asked") or None) for name, who in named}
        sides = [side.strip() for side in prompts.names("sides", 0, 2)]

        def verdicts(spoken: Sequence[str]) -> Sequence[str]:
            # Without sides the moderator picks an answer of the affirmative side, which speaks first in each round.
            answers = [read_answer(words, prompts("answer")) for words in spoken[::2]]
            return sides or list(dict.fromkeys(answer for answer in answers if answer))

        graph = iterative_debate(
            roles,
            verdicts=verdicts,
            go_on=prompts("go_on"),
            rounds=options.rounds,
            system=prompts("system"),
            sampling=sampling,
        )
        return Play(graph, (("user", item.question),))

    def judge(
        self, item: Question, options: IterativeDebateOptions, prompts: Prompts, state: Mapping[str, Any]
    ) -> Result:
        from choreo_agents.workflows.graphs.iterative_debate import AFFIRMATIVE, MODERATOR, NEGATIVE

        verdict, sides = answers_of(state, MODERATOR), [side.strip() for side in prompts.names("sides", 0, 2)]
        answer = verdict[-1]
        if answer in sides:
            answer = read_answer(answers_of(state, (AFFIRMATIVE, NEGATIVE)[sides.index(answer)])[-1], prompts("answer"))
        return Result(answer, item.score(answer), {"share of rounds": len(verdict) / options.rounds})
