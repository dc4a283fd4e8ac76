"""Problems in which workers speak side by side, where no other task has them: two hops, reports, parts of a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import AllSentences, FirstSentence, LastSentence, sentences
from choreo_bench.language.sentences import Fact, Friend, Has, Likes, Visits, draw_about, draw_distinct, draw_has
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to
from choreo_bench.language.tasks.merging import BranchSolveMerge
from choreo_bench.language.tasks.recall import READ

Chosen = TypeVar("Chosen", bound=Fact)


@dataclass(frozen=True)
class SpokenHops:
    """Workers say who is whose friend, or who has what; the question takes a sentence of one and of another."""

    workers: int = 4
    facts: int = 3
    """That each worker says. All workers together know twice as many people, of whom there are 64."""
    name: str = "spoken_hops"

    def draw(self, rng: random.Random) -> Problem:
        return self.draw_several(rng, 1)[0]

    def draw_several(self, rng: random.Random, questions: int) -> list[Problem]:
        """Draw several problems with the same messages (see `SeveralQuestions`)."""
        # Half of the workers, rounded up, know friends: of each of them another worker knows what the friend has.
        knowing = (self.workers + 1) // 2
        count = knowing * self.facts
        people = draw_distinct(rng, vocabulary.PEOPLE, 2 * count)
        friends = [Friend(person, friend) for person, friend in zip(people[:count], people[count:], strict=True)]
        known = [draw_has(rng, fact.friend) for fact in rng.sample(friends, (self.workers - knowing) * self.facts)]
        facts: list[Fact] = [*friends, *known]
        words = [
            " ".join(fact.sentence() for fact in facts[start : start + self.facts])
            for start in range(0, len(facts), self.facts)
        ]
        rng.shuffle(words)
        [author] = draw_agents(rng, 1)
        whose = {friend.friend: friend for friend in friends}
        return [self._asked(words, whose[fact.person], fact, author) for fact in _chosen(rng, known, questions)]

    def _asked(self, words: Sequence[str], friend: Friend, fact: Has, author: str) -> Problem:
        draft = Draft(READ)
        _report(draft, words)
        draft.add("ask", "user", f"What does the friend of {friend.person} have?")
        gold = fact.sentence()
        answer = draft.say("answer", f"{friend.sentence()} {gold}", author)
        return draft.done(self.name, gold, LastSentence(answer, gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, workers=up_to(rng, 2, 8, hardness), facts=rng.randint(1, 4))


@dataclass(frozen=True)
class SpokenReports:
    """Workers report people's things, journeys and tastes at length; the question is about one sentence of one."""

    workers: int = 4
    facts: int = 8
    """In each report. All reports together hold at most three for each person there is."""
    name: str = "spoken_reports"

    def draw(self, rng: random.Random) -> Problem:
        return self.draw_several(rng, 1)[0]

    def draw_several(self, rng: random.Random, questions: int) -> list[Problem]:
        """Draw several problems with the same messages (see `SeveralQuestions`)."""
        kinds: tuple[type[Fact], ...] = (Has, Visits, Likes)
        pairs = [(person, kind) for person in vocabulary.PEOPLE for kind in kinds]
        facts = [draw_about(rng, *pair) for pair in rng.sample(pairs, self.workers * self.facts)]
        [author] = draw_agents(rng, 1)
        words = [
            " ".join(fact.sentence() for fact in facts[start : start + self.facts])
            for start in range(0, len(facts), self.facts)
        ]
        return [self._asked(words, fact, author) for fact in _chosen(rng, facts, questions)]

    def _asked(self, words: Sequence[str], fact: Fact, author: str) -> Problem:
        draft = Draft(READ)
        _report(draft, words)
        draft.add("ask", "user", fact.question())
        gold = fact.sentence()
        return draft.done(self.name, gold, FirstSentence(draft.say("answer", gold, author), gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, workers=up_to(rng, 2, 8, hardness), facts=rng.randint(1, 8))


@dataclass(frozen=True)
class SpokenParts:
    """The merge of `BranchSolveMerge`, its plan and its parts written already."""

    workers: int = 4
    size: int = 2
    """People, each with a thing, in each part. All parts together have at most 30, one for each thing there is."""
    name: str = "spoken_parts"

    def draw(self, rng: random.Random) -> Problem:
        whole = BranchSolveMerge(branches=self.workers, size=self.size).draw(rng)
        messages = tuple(replace(message, is_answer=message.name == "merged") for message in whole.messages)
        scorer = AllSentences("merged", tuple(sentences(whole.gold)))
        return Problem(
            self.name, messages, whole.gold, scorer, key=tuple(m.text for m in whole.messages if not m.is_answer)
        )

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, workers=up_to(rng, 2, 8, hardness), size=rng.randint(1, 2))


def _chosen(rng: random.Random, facts: Sequence[Chosen], most: int) -> list[Chosen]:
    """Choose a fact, and different ones up to a number in all."""
    first = rng.choice(facts)
    return [first, *rng.sample([fact for fact in facts if fact != first], min(most, len(facts)) - 1)]


def _report(draft: Draft, words: Sequence[str]) -> None:
    """Append what workers report, none of whom has heard another: in users' turns, as reports always come."""
    seen = draft.names
    for number, report in enumerate(words, start=1):
        draft.add(f"report {number}", "user", f"Report {number}: {report}", sees=seen)
