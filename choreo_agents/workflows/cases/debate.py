"""Case of the parallel debate (MADpar): scored by the answer that most agents end with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of
from choreo_agents.workflows.cases.answers import Question, majority, read_answer

MOST_AGENTS = 8
REPORTS = 9
"""Reports in the record of each bundled problem, about 98 tokens each."""


class DebateItem(Question):
    """A question, with private notes of the agents and a record that all of them share."""

    notes: tuple[str, ...] = ()
    """Private system prompts of the agents, in their order; agents beyond the last have none."""
    record: tuple[str, ...] = ()
    """Messages that all agents read before the question."""

    @property
    def mistaken(self) -> list[int]:
        """Indices of agents with wrong notes: these have the answer's first two words, but not the whole answer."""
        start = " ".join((self.answer or "").split()[:2])
        wrong = [self.answer is not None and f"{start} " in notes and self.answer not in notes for notes in self.notes]
        return [place for place, is_wrong in enumerate(wrong) if is_wrong]


class DebateOptions(Options):
    """Options: the number of agents and of rounds."""

    agents: int = Field(default=3, ge=2, le=MOST_AGENTS, description="Number of agents.")
    rounds: int = Field(default=3, ge=1, description="Rounds in which each agent answers.")


class RecordOptions(DebateOptions):
    """Options of a bundled debate, which add the length of its record."""

    rounds: int = Field(default=2, ge=1, description="Rounds in which each agent answers.")
    reports: int = Field(
        default=REPORTS,
        ge=1,
        le=REPORTS,
        description="Reports in the record that all agents read, about 98 tokens each.",
    )


class DebateCase(Case):
    """A debate between agents with different notes; the bundled problems give wrong notes to a minority."""

    name: ClassVar[str] = "debate"
    summary: ClassVar[str] = "Agents answer in parallel rounds, each hearing the others' last answers (MADpar)."
    options: ClassVar[type[Options]] = DebateOptions
    item: ClassVar[type[Item]] = DebateItem

    def play(self, item: DebateItem, options: DebateOptions, prompts: Prompts, sampling: Sampling) -> Play:
        from choreo_agents.workflows.graphs.debate import debate

        names = self.agents(options, prompts)
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
        replies = [answers_of(state, name) for name in self.agents(options, prompts)]
        last = [read_answer(texts[-1], prompts("answer")) for texts in replies]
        first = item.score(read_answer(replies[0][0], prompts("answer")))
        answer = majority(last)
        return Result(answer, item.score(answer), {} if first is None else {"first agent's first answer": first})

    def agents(self, options: DebateOptions, prompts: Prompts) -> list[str]:
        """Return the names of the agents."""
        names = prompts.names("agents")
        return [names[i] if i < len(names) else f"Agent{i + 1}" for i in range(options.agents)]


class RecordDebate(DebateCase):
    """Agents answer in parallel rounds, each hearing the others' last answers (MADpar).

    They debate over one record. All read the same reports; each agent also has private notes, as a system prompt: one
    agent's have the answer, a minority's are wrong (of two agents, nobody's), and the others have to find it in the
    record. In every round all agents speak at once and see the others' last answers. Then the baseline's debate is
    repeated, token for token, under all three methods, and a table shows what each had to encode. A prefix cache cannot
    share the record, because it comes after each agent's own system prompt.

    [dim]The embedded model was never trained to read caches, so sharing them costs it accuracy: compare
    the two final answers.[/dim]

    [b]Examples[/b]

      choreo run debate --seed 1
      choreo run debate --method baseline --no-compare
      choreo run debate --agents 5 --rounds 3 --json
      choreo run debate --reports 1
      choreo run debate --inputs questions.jsonl --out answers.jsonl
    """

    options: ClassVar[type[Options]] = RecordOptions
