"""MADpar: what most agents end with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from choreo_agents.workflows.case import Case, Item, Options, Play, Prompts, Result, Sampling, answers_of
from choreo_agents.workflows.cases.answers import Question, majority, read_answer

MOST_AGENTS = 8
REPORTS = 9
"""Of each record that is shipped: about 98 tokens each."""


class DebateItem(Question):
    """A question, and what each agent knows."""

    notes: tuple[str, ...] = ()
    """Each agent's private system prompt, in turn; without any, all know the same."""
    record: tuple[str, ...] = ()
    """What all of them read before they are asked."""

    @property
    def mistaken(self) -> list[int]:
        """Whose notes say something else of what is asked: which begins as the answer does."""
        asked = " ".join((self.answer or "").split()[:2])
        told = [self.answer is not None and f"{asked} " in notes and self.answer not in notes for notes in self.notes]
        return [place for place, is_wrong in enumerate(told) if is_wrong]


class DebateOptions(Options):
    """How many debate how long."""

    agents: int = Field(default=3, ge=2, le=MOST_AGENTS, description="How many debate.")
    rounds: int = Field(default=3, ge=1, description="How often each of them speaks.")


class RecordOptions(DebateOptions):
    """Options of a debate that is shipped: how long its record is."""

    rounds: int = Field(default=2, ge=1, description="How often each of them speaks.")
    reports: int = Field(
        default=REPORTS, ge=1, le=REPORTS, description="Of the record that all agents read, about 98 tokens each."
    )


class DebateCase(Case):
    """Agents with unequal notes; a minority's are wrong."""

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
        last = [read_answer(each[-1], prompts("answer")) for each in replies]
        first = item.score(read_answer(replies[0][0], prompts("answer")))
        answer = majority(last)
        return Result(answer, item.score(answer), {} if first is None else {"first agent's first answer": first})

    def agents(self, options: DebateOptions, prompts: Prompts) -> list[str]:
        """Who debates."""
        names = prompts.names("agents")
        return [names[i] if i < len(names) else f"Agent{i + 1}" for i in range(options.agents)]


class RecordDebate(DebateCase):
    """Agents answer in parallel rounds, each hearing the others' last answers (MADpar).

    They debate over one record. All read the same reports; each agent also has notes of its own, as a private system
    prompt: one knows the answer, a minority is wrong (of two agents, nobody), and the others have to find it in the
    record. In every round all of them speak at once, seeing what the others said last. Then the debate as the baseline
    holds it is repeated, word for word, under all three methods, and a table shows what each had to encode. A prefix
    cache cannot share the record: it stands behind each agent's own prompt.

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
