"""Putting two and two together: two-hop questions across documents, a diagnosis from several monitors."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Self

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import LastSentence, Mean
from choreo_bench.language.sentences import Friend, draw_distinct, draw_has, notes_text
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to
from choreo_bench.language.tasks.recall import READ


@dataclass(frozen=True)
class TwoHop:
    """A question that takes two documents: one says who is whose friend, the other who has what."""

    people: int = 6
    questions: int = 1
    name: str = "two_hop"

    def draw(self, rng: random.Random) -> Problem:
        drawn = draw_distinct(rng, vocabulary.PEOPLE, 2 * self.people)
        people, others = drawn[: self.people], drawn[self.people :]
        friends = [Friend(person, friend) for person, friend in zip(people, others, strict=True)]
        facts = {person: draw_has(rng, person) for person in others}
        order = list(facts.values())
        rng.shuffle(order)
        documents = [notes_text(friends), notes_text(order)]
        rng.shuffle(documents)
        draft = Draft(READ)
        for number, words in enumerate(documents, start=1):
            draft.add(f"notes {number}", "system", words, sees=["rules"])
        [author] = draw_agents(rng, 1)
        gold: list[LastSentence] = []
        for number in range(1, self.questions + 1):
            friend_asked = rng.choice(friends)
            answer = facts[friend_asked.friend].sentence()
            draft.add(f"question {number}", "user", f"What does the friend of {friend_asked.person} have?")
            answer_name = draft.say(f"answer {number}", f"{friend_asked.sentence()} {answer}", author)
            gold.append(LastSentence(answer_name, answer))
        return draft.done(self.name, " ".join(score.gold for score in gold), Mean(tuple(gold)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, people=up_to(rng, 2, 8, hardness), questions=rng.randint(1, 3))


@dataclass(frozen=True)
class Diagnosis:
    """Each monitor reports its gauge; two are out of range, and the rule for those two names the broken part."""

    gauges: int = 5
    rules: int = 5
    name: str = "diagnosis"

    def draw(self, rng: random.Random) -> Problem:
        gauges = list(vocabulary.GAUGES)[: self.gauges]
        conditions = [
            pair
            for one, other in combinations(gauges, 2)
            for pair in product(vocabulary.GAUGES[one], vocabulary.GAUGES[other])
        ]
        known = rng.sample(conditions, self.rules)
        parts = draw_distinct(rng, vocabulary.PARTS, self.rules)
        rules = [f"{a} and {b}: {part} broken." for (a, b), part in zip(known, parts, strict=True)]
        *monitors, author = draw_agents(rng, self.gauges + 1)
        true = rng.randrange(self.rules)
        draft = Draft(f"Rules: {' '.join(rules)}", name="handbook")
        draft.add("problem", "user", "What do you see?")
        shown = [next((at for at in vocabulary.GAUGES[g] if at in known[true]), "normal") for g in gauges]
        reports = [f"{gauge}: {at}." for gauge, at in zip(gauges, shown, strict=True)]
        draft.hear(list(zip(monitors, reports, strict=True)))
        draft.add("ask", "user", "What is broken?")
        gold = f"We see {rules[true]}"
        return draft.done(self.name, gold, LastSentence(draft.say("answer", gold, author), gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        gauges = rng.randint(3, 6)
        return replace(self, gauges=gauges, rules=up_to(rng, 2, 7, hardness))
