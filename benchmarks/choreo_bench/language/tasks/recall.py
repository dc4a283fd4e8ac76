"""Finding facts again: recall, several questions at once (MultiQA of Prompt Choreography), many documents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import AllSentences, EachExact, FirstSentence, Mean
from choreo_bench.language.sentences import (
    UNKNOWN,
    Fact,
    Has,
    Likes,
    Visits,
    draw_about,
    draw_distinct,
    draw_facts,
    notes_text,
)
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to

READ = "Answer from the notes."


@dataclass(frozen=True)
class Recall:
    """Documents of facts, then questions one after the other, each answered by its sentence."""

    documents: int = 2
    facts: int = 4
    """In each document."""
    questions: int = 2
    unknown: float = 0.1
    """Share of questions that no document answers."""
    kinds: int | None = None
    """Different numbers, colours and things among the facts, the fewer the more alike they are; None: all."""
    name: str = "recall"

    def draw(self, rng: random.Random) -> Problem:
        facts = draw_facts(rng, self.documents * self.facts, self.kinds)
        draft = Draft(READ)
        for number in range(self.documents):
            held = facts[number * self.facts : (number + 1) * self.facts]
            draft.add(f"notes {number + 1}", "system", notes_text(held))
        [author] = draw_agents(rng, 1)
        gold: list[tuple[str, str]] = []
        for number in range(1, self.questions + 1):
            question, answer = _ask(rng, facts, self.unknown)
            draft.add(f"question {number}", "user", question)
            gold.append((draft.say(f"answer {number}", answer, author), answer))
        return draft.done(self.name, " ".join(answer for _, answer in gold), EachExact(tuple(gold)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        documents = rng.choice((1, 1, 2, 3))
        most = max(2, 12 // documents)
        facts, questions = up_to(rng, 2, most, hardness), rng.randint(1, 6)
        return replace(self, documents=documents, facts=facts, questions=questions, kinds=_kinds(rng))


@dataclass(frozen=True)
class SeveralQuestions:
    """Questions asked at once, in messages of their own, and one reply that answers each in order (figure 4)."""

    questions: int = 2
    facts: int = 6
    elliptic: float = 0.0
    """Share of later questions that lean on the one before: `And Bob?`"""
    kinds: int | None = None
    """As for `Recall`."""
    name: str = "two_questions"

    def draw(self, rng: random.Random) -> Problem:
        facts = draw_facts(rng, self.facts, self.kinds)
        chosen = rng.sample(facts, self.questions)
        draft = Draft(READ)
        draft.add("notes", "system", notes_text(facts))
        seen = draft.names
        for number, fact in enumerate(chosen, start=1):
            short = number > 1 and rng.random() < self.elliptic
            question = f"And {fact.person}?" if short else fact.question()
            draft.add(f"question {number}", "user", question, sees=seen)
        answers = tuple(fact.sentence() for fact in chosen)
        [author] = draw_agents(rng, 1)
        answer = draft.say("answer", " ".join(answers), author)
        return draft.done(self.name, " ".join(answers), AllSentences(answer, answers))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        facts, elliptic = up_to(rng, 3, 10, hardness), rng.choice((0.0, 0.0, 0.4))
        return replace(self, facts=facts, questions=rng.randint(1, 3), elliptic=elliptic, kinds=_kinds(rng))


@dataclass(frozen=True)
class MultiDocument:
    """A question about many reports of people's things, journeys and tastes: up to about 1,000 tokens."""

    fewest: int = 4
    """Documents, from so many ..."""
    most: int = 16
    """... to so many."""
    facts: int = 10
    """In each document, six tokens each at most."""
    questions: int = 1
    unknown: float = 0.05
    name: str = "multi_document"

    def draw(self, rng: random.Random) -> Problem:
        kinds: tuple[type[Fact], ...] = (Has, Visits, Likes)
        documents = rng.randint(self.fewest, self.most)
        pairs = [(person, kind) for person in vocabulary.PEOPLE for kind in kinds]
        facts = [draw_about(rng, *pair) for pair in rng.sample(pairs, documents * self.facts)]
        draft = Draft(READ)
        for number in range(documents):
            words = " ".join(fact.sentence() for fact in facts[number * self.facts : (number + 1) * self.facts])
            draft.add(f"report {number + 1}", "user", f"Report {number + 1}: {words}", sees=["rules"])
        [author] = draw_agents(rng, 1)
        gold: list[FirstSentence] = []
        for number in range(1, self.questions + 1):
            question, answer = _ask(rng, facts, self.unknown)
            draft.add(f"question {number}", "user", question)
            gold.append(FirstSentence(draft.say(f"answer {number}", answer, author), answer))
        return draft.done(self.name, " ".join(score.gold for score in gold), Mean(tuple(gold)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        # Long prompts are dear: most are shorter, and several questions are asked about each.
        fewest, most = (4, 16) if rng.random() < 0.35 * hardness else (1, 1 + round(5 * hardness))
        return replace(self, fewest=fewest, most=most, facts=rng.randint(4, 11), questions=rng.randint(1, 6))


def _kinds(rng: random.Random) -> int | None:
    """Draw a number of kinds for training: in half of the problems only the person tells facts apart."""
    return rng.choice((None, None, 2, 3))


def _ask(rng: random.Random, facts: Sequence[Fact], unknown: float) -> tuple[str, str]:
    """A question about the facts and its answer."""
    fact = rng.choice(facts)
    if rng.random() >= unknown:
        return fact.question(), fact.sentence()
    people = {other.person for other in facts if type(other) is type(fact)}
    absent = [person for person in vocabulary.PEOPLE if person not in people]
    if not absent:
        return fact.question(), fact.sentence()
    return draw_about(rng, draw_distinct(rng, absent, 1)[0], type(fact)).question(), UNKNOWN
