"""Choosing among what several said: by majority, by support, by who is to be trusted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import FirstSentence
from choreo_bench.language.sentences import Has, draw_facts, with_wrong_number
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to

SPEAK = "Agents answer on their own."


@dataclass(frozen=True)
class MajorityVote:
    """Agents answer a question; the answer that most of them gave is to be named. No answer ties with it."""

    voters: int = 5
    answers: int = 3
    """Different answers at most."""
    name: str = "majority_vote"

    def draw(self, rng: random.Random) -> Problem:
        versions = _versions(rng, self.answers)
        while True:
            votes = [rng.choice(versions) for _ in range(self.voters)]
            ranks = Counter(votes).most_common()
            if len(ranks) == 1 or ranks[0][1] > ranks[1][1]:
                break
        *voters, author = draw_agents(rng, self.voters + 1)
        draft = Draft(SPEAK)
        draft.add("problem", "user", versions[0].question())
        draft.hear([(voter, vote.sentence()) for voter, vote in zip(voters, votes, strict=True)])
        draft.add("ask", "user", "What do most say?")
        gold = ranks[0][0].sentence()
        answer = draft.say("answer", gold, author)
        return draft.done(self.name, gold, FirstSentence(answer, gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, voters=up_to(rng, 2, 7, hardness), answers=rng.choice((2, 3, 3)))


@dataclass(frozen=True)
class BestSupported:
    """Agents answer with so much support behind them; the answer with the most is to be named."""

    candidates: int = 4
    largest: int = 12
    """Support of an answer at most."""
    name: str = "best_supported"

    def draw(self, rng: random.Random) -> Problem:
        facts = [draw_facts(rng, 1)[0]]
        facts += [replace(draw_facts(rng, 1)[0], person=facts[0].person) for _ in range(self.candidates - 1)]
        support = rng.sample(range(2, self.largest + 1), self.candidates)
        words = [f"Support {count}: {fact.what()}." for count, fact in zip(support, facts, strict=True)]
        *agents, author = draw_agents(rng, self.candidates + 1)
        draft = Draft(SPEAK)
        draft.add("problem", "user", facts[0].question())
        draft.hear(list(zip(agents, words, strict=True)))
        draft.add("ask", "user", "Which answer has most support?")
        gold = words[support.index(max(support))]
        answer = draft.say("answer", gold, author)
        return draft.done(self.name, gold, FirstSentence(answer, gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, candidates=up_to(rng, 2, 5, hardness), largest=rng.choice((12, 12, 20)))


@dataclass(frozen=True)
class Conflict:
    """Reports contradict each other; the reporter with the most trust is to be believed."""

    reports: int = 3
    largest: int = 12
    """Trust at most."""
    name: str = "conflict"

    def draw(self, rng: random.Random) -> Problem:
        facts = [draw_facts(rng, 1)[0]]
        facts += [replace(draw_facts(rng, 1)[0], person=facts[0].person) for _ in range(self.reports - 1)]
        *agents, author = draw_agents(rng, self.reports + 1)
        trust = dict(zip(agents, rng.sample(range(2, self.largest + 1), self.reports), strict=True))
        # Told in another order than they report in, so that the place says nothing.
        order = rng.sample(agents, self.reports)
        draft = Draft("Trust: " + " ".join(f"{trust[agent]} points for {agent}." for agent in order), name="trust")
        draft.add("problem", "user", facts[0].question())
        draft.hear([(agent, f"{fact.what()}.") for agent, fact in zip(agents, facts, strict=True)])
        draft.add("ask", "user", "Who is right?")
        best = max(agents, key=trust.__getitem__)
        gold = f"{trust[best]} points for {best}: {facts[agents.index(best)].what()}."
        answer = draft.say("answer", gold, author)
        return draft.done(self.name, gold, FirstSentence(answer, gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, reports=up_to(rng, 2, 5, hardness), largest=rng.choice((12, 12, 20)))


def _versions(rng: random.Random, count: int) -> list[Has]:
    """A fact and `count - 1` others that differ from it, and from each other, in the number."""
    [fact] = draw_facts(rng, 1)
    versions = [fact]
    while len(versions) < count:
        wrong = with_wrong_number(rng, fact)
        if wrong not in versions:
            versions.append(wrong)
    return versions
