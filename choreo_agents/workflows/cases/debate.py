"""MADpar: what most agents end with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from choreo_agents.workflows.case import METHOD_VARIANTS, Item, Options, Play, Result, Variant, said
from choreo_agents.workflows.cases.answers import majority, read_answer
from choreo_agents.workflows.cases.questions import Question

if TYPE_CHECKING:
    from choreo_agents.sampling import Sampling
    from choreo_agents.workflows.phrasing import Prompts

MOST_AGENTS = 8
REPORTS = 9
"""Of each record that is shipped: about 98 tokens each."""


class DebateItem(Question):
    """A question, and what each agent knows."""

    notes: tuple[str, ...] = ()
    """Each agent's private system prompt, in turn; without any, all know the same."""
    record: tuple[str, ...] = ()
    """What all of them read before they are asked."""


class DebateOptions(Options):
    """How many debate how long."""

    agents: int = Field(default=3, ge=2, le=MOST_AGENTS, description="How many debate.")
    rounds: int = Field(default=3, ge=1, description="How often each of them speaks.")


class DebateCase:
    """Agents with unequal notes; a minority's are wrong."""

    name: ClassVar[str] = "debate"
    summary: ClassVar[str] = "Agents answer in parallel rounds, each hearing the others' last answers (MADpar)."
    options: ClassVar[type[Options]] = DebateOptions
    item: ClassVar[type[Item]] = DebateItem
    variants: ClassVar[Mapping[str, Variant]] = METHOD_VARIANTS
    scored: ClassVar[str] = "right"
    higher_is_better: ClassVar[bool] = True

    def play(self, item: DebateItem, options: DebateOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.debate import debate

        names = self._agents(options, prompts)
        notes = dict(zip(names, [*item.notes, *[None] * len(names)], strict=False))
        graph = debate(
            notes,
            rounds=options.rounds,
            system=prompts("system"),
            question=item.question if item.record else None,
            revise=prompts("revise") or None,
            sampling=sampling,
        )
        return Play(graph, tuple(("user", words) for words in item.record or (item.question,)))

    def judge(self, item: DebateItem, options: DebateOptions, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        replies = [said(state, name) for name in self._agents(options, prompts)]
        last = [read_answer(each[-1], prompts("answer")) for each in replies]
        first = item.score(read_answer(replies[0][0], prompts("answer")))
        answer = majority(last)
        return Result(answer, item.score(answer), {} if first is None else {"first agent's first answer": first})

    def _agents(self, options: DebateOptions, prompts: Prompts) -> list[str]:
        names = prompts.names("agents")
        return [names[i] if i < len(names) else f"Agent{i + 1}" for i in range(options.agents)]
