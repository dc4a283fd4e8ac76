"""Debates among agents whose notes differ: a whole one, and one agent's turn in one."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem, Said, Split, split_of
from choreo_bench.language.scoring import EachExact, first_sentence
from choreo_bench.language.sentences import (
    AGREE,
    CHANGE,
    KEEP,
    UNKNOWN,
    Has,
    draw_facts,
    notes_text,
    plurality,
    revise,
    with_wrong_number,
)
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to

ANSWER = re.compile(r"[A-Z]\w+ has \d+ \w+ \w+\.")
MOST_AGENTS = 8
DEBATE_RULES = "Agents read their notes, hear each other and agree on one answer."


@dataclass(frozen=True)
class DebateProblem:
    """A question, its true answer, and what each agent's notes say about it (a minority is wrong)."""

    question: str
    answer: str
    agents: tuple[str, ...]
    notes: tuple[str, ...]
    """One text per agent, for its system prompt."""
    record: tuple[str, ...] = ()
    """Reports that all agents read before they are asked (see `record_debate_problem`)."""


def debate_problem(
    seed: int, *, agents: int = 3, facts: int = 4, wrong: int | None = None, split: Split = "test"
) -> DebateProblem:
    """Draw a debate in which most agents' notes are right about what is asked.

    Args:
        seed: The same seed draws the same problem.
        agents: How many agents, 2 to 8.
        facts: Facts in each agent's notes.
        wrong: Agents whose notes give a wrong number; by default as many as still leave a strict plurality
            to the truth, whatever wrong numbers they hold.
        split: The split that its words belong to.
    """
    rng = random.Random(f"debate {seed}")
    while True:
        problem = draw_debate(rng, agents=agents, facts=facts, wrong=wrong)
        if split_of([DEBATE_RULES, problem.question, *problem.notes]) == split:
            return problem


def draw_debate(rng: random.Random, *, agents: int = 3, facts: int = 4, wrong: int | None = None) -> DebateProblem:
    """Draw the problem of a debate from a generator (see `debate_problem`)."""
    minority = minority_of(agents)
    truths = draw_facts(rng, facts)
    topic = rng.choice(truths)
    mistaken = set(rng.sample(range(agents), minority if wrong is None else wrong))
    notes: list[str] = []
    for index in range(agents):
        held = [with_wrong_number(rng, fact) if fact is topic and index in mistaken else fact for fact in truths]
        rng.shuffle(held)
        notes.append(notes_text(held))
    return DebateProblem(
        question=topic.question(),
        answer=topic.sentence(),
        agents=vocabulary.AGENTS[:agents],
        notes=tuple(notes),
    )


def minority_of(agents: int) -> int:
    """Return how many debaters may be wrong, each differently or all alike, so that the truth still prevails.

    Raises:
        ValueError: No debate has so many.
    """
    if not 2 <= agents <= MOST_AGENTS:
        raise ValueError(f"agents must be between 2 and {MOST_AGENTS}, not {agents!r}")
    return (agents - 1) // 2


@dataclass(frozen=True)
class DebateScorer:
    """Right if more agents end with the true answer than with any other."""

    last: tuple[str, ...]
    gold: str

    def __call__(self, answers: Said) -> float:
        counts = Counter(first_sentence(answers[name]) for name in self.last)
        others = max((count for words, count in counts.items() if words not in (self.gold, UNKNOWN)), default=0)
        return float(counts[self.gold] > others)

    def parsable(self, answers: Said) -> bool:
        """Return whether every agent ends with an answer, or says that it knows none."""
        last = [first_sentence(answers[name]) for name in self.last]
        return all(words == UNKNOWN or ANSWER.fullmatch(words) for words in last)


@dataclass(frozen=True)
class Debate:
    """A whole debate: every agent speaks in every round, seeing its own words and the others' last ones."""

    agents: int = 3
    rounds: int = 3
    facts: int = 4
    name: str = "debate"

    def draw(self, rng: random.Random) -> Problem:
        problem = draw_debate(rng, agents=self.agents, facts=self.facts)
        draft = Draft(DEBATE_RULES)
        question = draft.add("question", "user", problem.question)
        person = problem.answer.split()[0]
        own: dict[str, list[str]] = {}
        latest: dict[str, str] = {}
        for agent, notes in zip(problem.agents, problem.notes, strict=True):
            draft.add(f"notes {agent}", "system", notes, sees=["rules"])
            latest[agent] = next(f"{part}." for part in notes[7:-1].split(". ") if part.split()[0] == person)
        for agent in problem.agents:
            own[agent] = [draft.say(f"{agent} 1", latest[agent], agent, sees=["rules", f"notes {agent}", question])]
        for number in range(2, self.rounds + 1):
            before = dict(latest)
            last = {agent: own[agent][-1] for agent in problem.agents}
            for agent in problem.agents:
                others = [other for other in problem.agents if other != agent]
                words = revise(before[agent], [before[other] for other in others])
                latest[agent] = first_sentence(words)
                sees = ["rules", f"notes {agent}", question, *own[agent], *(last[other] for other in others)]
                own[agent].append(draft.say(f"{agent} {number}", words, agent, sees=sees))
        last_words = tuple(own[agent][-1] for agent in problem.agents)
        return draft.done(self.name, problem.answer, DebateScorer(last_words, problem.answer))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, agents=rng.randint(2, 5), rounds=rng.randint(1, 4), facts=up_to(rng, 1, 7, hardness))


@dataclass(frozen=True)
class DebateTurn:
    """A turn of one agent in one round of a debate whose other agents say all sorts of things."""

    facts: int = 4
    others: int = 2
    rounds: int = 3
    name: str = "debate_turn"

    def draw(self, rng: random.Random) -> Problem:
        facts = draw_facts(rng, self.facts)
        topic = rng.choice(facts)
        versions = [topic, with_wrong_number(rng, topic), with_wrong_number(rng, topic)]
        me, *others = draw_agents(rng, 1 + self.others)
        my_notes = None if rng.random() < 0.15 else [rng.choice(versions) if f is topic else f for f in facts]
        if my_notes and rng.random() < 0.1:
            my_notes = [fact for fact in my_notes if fact.person != topic.person]
        mine = next((f.sentence() for f in my_notes or [] if f.person == topic.person), UNKNOWN)
        draft = Draft(DEBATE_RULES)
        if my_notes:
            draft.add("notes", "system", notes_text(rng.sample(my_notes, len(my_notes))))
        draft.add("question", "user", topic.question())
        rounds = self.rounds if others else 1
        heard = [_position(rng, versions) for _ in others]
        gold: list[tuple[str, str]] = []
        if rounds == 1 or rng.random() < 0.2:
            # A judge, or one who speaks for the first time after the others: its notes count as one voice.
            draft.hear(_heard(rng, others, heard, rounds if others else 0))
            words = plurality(mine, heard)
        else:
            gold.append((draft.say(f"{me} 1", mine, me), mine))
            own = mine
            for number in range(2, rounds):
                # Earlier rounds of one's own stay in view, those of the others have been replaced by their last.
                own = revise(own, [_position(rng, versions) for _ in others])
                draft.add(f"{me} {number}", "assistant", own, author=me)
                own = first_sentence(own)
            draft.hear(_heard(rng, others, heard, rounds - 1))
            words = revise(own, heard)
        gold.append((draft.say("answer", words, me), words))
        return draft.done(self.name, words, EachExact(tuple(gold)))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(
            self,
            facts=up_to(rng, 1, 7, hardness),
            others=rng.choice((0, 1, 2, 2, 2, 2, 3, 4)),
            rounds=rng.choice((1, 2, 2, 3, 3, 4)),
        )


def _position(rng: random.Random, versions: Sequence[Has]) -> str:
    return UNKNOWN if rng.random() < 0.08 else rng.choice(versions).sentence()


def _heard(rng: random.Random, names: list[str], answers: list[str], round_: int) -> list[tuple[str, str]]:
    """The others' last answers; after the first round they may carry a remark."""
    heard: list[tuple[str, str]] = []
    for name, answer in zip(names, answers, strict=True):
        remark = rng.choice((AGREE, KEEP, CHANGE)) if round_ > 1 and answer != UNKNOWN else ""
        heard.append((name, f"{answer} {remark}".strip()))
    return heard
