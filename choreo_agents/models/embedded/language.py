"""The embedded language: facts about people, questions, answers, and debates among agents with unequal notes.

Everything is drawn from a `random.Random`, so the same seed gives the same problem. Sentences are plain English
("Ann has 3 red kites.") and a gold answer is a sentence too.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

from choreo_agents.models.embedded import vocabulary

UNKNOWN = "I do not know."
AGREE, KEEP, CHANGE = "We all agree.", "I keep my answer.", "I change my answer."
DEBATE_RULES = "Agents read their notes, hear each other and agree on one answer."


@dataclass(frozen=True)
class Fact:
    """Who has how many of what: one sentence."""

    person: str
    number: str
    color: str
    objects: str

    def sentence(self) -> str:
        return f"{self.person} has {self.number} {self.color} {self.objects}."


@dataclass(frozen=True)
class DebateProblem:
    """A question, its true answer, and what each agent's notes say about it (a minority is wrong)."""

    question: str
    answer: str
    agents: tuple[str, ...]
    notes: tuple[str, ...]
    """One text per agent, for its system prompt."""

    def is_correct(self, reply: str) -> bool:
        """Whether the reply's first sentence is the true answer."""
        return first_sentence(reply) == self.answer


def first_sentence(text: str) -> str:
    """The part of a reply that states the answer: up to and with the first full stop."""
    head, stop, _ = text.strip().partition(".")
    return head + stop


def question_about(person: str) -> str:
    return f"What does {person} have?"


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts about different people."""
    return [
        Fact(person, rng.choice(vocabulary.NUMBERS), rng.choice(vocabulary.COLORS), rng.choice(vocabulary.OBJECTS))
        for person in rng.sample(vocabulary.PEOPLE, count)
    ]


def with_wrong_number(rng: random.Random, fact: Fact) -> Fact:
    """The same fact with another number: what unreliable notes say."""
    return replace(fact, number=rng.choice([n for n in vocabulary.NUMBERS if n != fact.number]))


def notes_text(facts: list[Fact]) -> str:
    return "Notes: " + " ".join(fact.sentence() for fact in facts)


def plurality(own: str | None, others: list[str]) -> str:
    """The answer most agents gave, `I do not know.` aside; ties go to one's own, then to the first heard."""
    heard = [answer for answer in ([] if own is None else [own]) + others if answer != UNKNOWN]
    if not heard:
        return UNKNOWN
    counts = Counter(heard)
    best = max(counts.values())
    return next(answer for answer in heard if counts[answer] == best)


def revise(own: str, others: list[str]) -> str:
    """What an agent says in a later round: the plurality of the last answers, and how that compares with its own."""
    choice = plurality(own, others)
    if choice == UNKNOWN:
        return UNKNOWN
    if own != choice:
        return f"{choice} {CHANGE}"
    return f"{choice} {AGREE if all(other == own for other in others) else KEEP}"


def debate_problem(seed: int, *, agents: int = 3, facts: int = 4, wrong: int | None = None) -> DebateProblem:
    """Draw a debate in which most agents' notes are right about what is asked.

    Args:
        seed: The same seed draws the same problem.
        agents: How many agents, 2 to 8.
        facts: Facts in each agent's notes.
        wrong: Agents whose notes give a wrong number; by default as many as still leave a strict plurality
            to the truth, whatever wrong numbers they hold.
    """
    if not 2 <= agents <= len(vocabulary.AGENTS):
        raise ValueError(f"agents must be between 2 and {len(vocabulary.AGENTS)}, not {agents!r}")
    rng = random.Random(f"debate {seed}")
    truths = draw_facts(rng, facts)
    asked = rng.choice(truths)
    mistaken = set(rng.sample(range(agents), (agents - 1) // 2 if wrong is None else wrong))
    notes: list[str] = []
    for index in range(agents):
        held = [with_wrong_number(rng, fact) if fact is asked and index in mistaken else fact for fact in truths]
        rng.shuffle(held)
        notes.append(notes_text(held))
    return DebateProblem(
        question=question_about(asked.person),
        answer=asked.sentence(),
        agents=vocabulary.AGENTS[:agents],
        notes=tuple(notes),
    )
