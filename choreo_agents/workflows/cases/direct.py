"""Case of a single call, on the questions of the other workflows: the baseline that they have to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of
from choreo_agents.workflows.cases.answers import read_answer
from choreo_agents.workflows.cases.debate import DebateItem


class DirectCase(Case):
    """A single agent; it has the notes of a debate's first agent."""

    name: ClassVar[str] = "direct"
    summary: ClassVar[str] = "One agent answers at once."
    options: ClassVar[type[Options]] = Options
    item: ClassVar[type[Item]] = DebateItem

    def play(self, item: DebateItem, options: Options, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.direct import direct

        notes = item.notes[0] if item.notes else None
        system = prompts("system" if notes is None else "system_with_notes")
        graph = direct(system=system, private=notes, speaker=prompts("speaker"), sampling=sampling)
        return Play(graph, (("user", item.question),))

    def judge(self, item: DebateItem, options: Options, prompts: Prompts, state: Mapping[str, Any]) -> Result:
        from choreo_agents.workflows.graphs.direct import SOLVER

        where = prompts("answer_with_notes" if item.notes else "answer")
        answer = read_answer(answers_of(state, SOLVER)[-1], where)
        return Result(answer, item.score(answer))
