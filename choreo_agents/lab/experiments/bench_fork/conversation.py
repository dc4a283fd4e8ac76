"""A conversation about facts, and subagents who are told something else first and then asked about it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from choreo_agents.chat import turn_said
from choreo_agents.lab.language import vocabulary
from choreo_agents.lab.language.sentences import Fact, Has, Likes, Visits, draw_about, draw_has, notes_text
from choreo_agents.lab.language.tasks.recall import READ
from choreo_agents.models import LoadedModel

QUESTIONS = 4
"""That the parent is asked."""
KINDS: tuple[type[Fact], ...] = (Has, Visits, Likes)
OWN_REPORT = 10
"""Facts of the one that a subagent is told besides, ..."""
OWN_FACTS = 8
"""... and of its system prompt."""


@dataclass(frozen=True)
class ForkedAgent:
    """A subagent."""

    system: SystemMessage
    """Its own."""
    task: tuple[HumanMessage, ...]
    """One more report, and a question about those that the parent has read."""
    answer: str
    """That is right."""


@dataclass(frozen=True)
class ForkedTalk:
    """What a parent was told and has said, and who is forked from there."""

    system: SystemMessage
    """The parent's."""
    talk: tuple[BaseMessage, ...]
    """Reports, then questions with their answers. It ends with a question, ..."""
    answer: str
    """... which the parent answers so."""
    agents: tuple[ForkedAgent, ...]

    @staticmethod
    def draw(model: LoadedModel, tokens: int, reports: int, agents: int, seed: str) -> ForkedTalk:
        """A conversation of the embedded language: every model with words can read it, one has been trained on it.

        Args:
            model: Counts tokens.
            tokens: Of all reports: at least so many, and what their last facts take beyond. Each has a fact.
            reports: How many there are.
            agents: How many are forked.
            seed: Decides.
        """
        rng = random.Random(f"fork {seed}")
        facts = _facts(rng)
        known: dict[tuple[str, type[Fact]], Fact] = {}
        talk: list[BaseMessage] = []
        for number in range(1, reports + 1):
            told: list[Fact] = []
            while not told or turn_tokens(model, _report(number, told)) < tokens / reports:
                told.append(next(facts))
            # What a later report says holds: each question has one answer.
            known |= {(fact.person, type(fact)): fact for fact in told}
            talk.append(_report(number, told))
        asked = rng.sample([*known.values()], min(QUESTIONS, len(known)))
        for fact in asked:
            talk += [HumanMessage(fact.question()), AIMessage(fact.sentence())]
        forked = tuple(_agent(rng, reports + 1 + number, [*known.values()]) for number in range(agents))
        return ForkedTalk(SystemMessage(READ), tuple(talk[:-1]), asked[-1].sentence(), forked)


def turn_tokens(model: LoadedModel, *messages: BaseMessage) -> int:
    """Tokens of messages as turns of their own."""
    return sum(len(model.encode(turn_said(each, model.chat, later=False).text)) for each in messages)


def _facts(rng: random.Random) -> Iterator[Fact]:
    """All that there is to say of anybody, and then once more, in other words."""
    pairs = [(person, kind) for person in vocabulary.PEOPLE for kind in KINDS]
    while True:
        rng.shuffle(pairs)
        yield from (draw_about(rng, *pair) for pair in pairs)


def _report(number: int, facts: Iterable[Fact]) -> HumanMessage:
    return HumanMessage(f"Report {number}: {' '.join(fact.sentence() for fact in facts)}")


def _agent(rng: random.Random, report: int, known: Sequence[Fact]) -> ForkedAgent:
    asked = rng.choice(known)
    others = rng.sample([person for person in vocabulary.PEOPLE if person != asked.person], OWN_FACTS + OWN_REPORT)
    own = [draw_has(rng, person) for person in others]
    task = _report(report, own[OWN_FACTS:]), HumanMessage(asked.question())
    return ForkedAgent(SystemMessage(notes_text(own[:OWN_FACTS])), task, asked.sentence())
