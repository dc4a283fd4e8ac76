"""Training transcripts of the embedded model: what it sees, and which messages it learns to say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from choreo_agents.models.embedded import vocabulary
from choreo_agents.models.embedded.language import (
    AGREE,
    CHANGE,
    DEBATE_RULES,
    KEEP,
    UNKNOWN,
    Fact,
    draw_facts,
    first_sentence,
    notes_text,
    plurality,
    question_about,
    revise,
    with_wrong_number,
)


@dataclass(frozen=True)
class Turn:
    """One message of a transcript; the model learns the words of `learn` turns only."""

    role: str
    text: str
    name: str | None = None
    learn: bool = False


Transcript = list[Turn]


def induction(rng: random.Random, _: float) -> Transcript:
    """Random words with repeated segments: the warm-up without which recall stays at chance."""
    vocabulary_words = vocabulary.words()
    words = rng.choices(vocabulary_words, k=rng.randint(4, 13))
    repeats: list[str] = []
    for _i in range(rng.randint(2, 4)):
        start = rng.randrange(len(words) - 2)
        repeats.extend(words[start : start + rng.randint(3, len(words))])
    return [Turn("user", " ".join(words)), Turn("assistant", " ".join(repeats), learn=True)]


def recall(rng: random.Random, hardness: float) -> Transcript:
    """Notes, then several questions about them, each answered by its sentence."""
    facts = draw_facts(rng, rng.randint(2, 3 + round(5 * hardness)))
    question, answer = _ask(rng, facts)
    turns = _opening(rng, notes_text(facts), [Turn("user", question)])
    turns.append(Turn("assistant", answer, _name(rng), learn=True))
    for _i in range(rng.randint(1, 5)):
        question, answer = _ask(rng, facts)
        turns += [Turn("user", question), Turn("assistant", answer, _name(rng), learn=True)]
    return turns


def several_questions(rng: random.Random, hardness: float) -> Transcript:
    """Two or three questions in messages of their own, one reply that answers each in order."""
    facts = draw_facts(rng, rng.randint(3, 3 + round(5 * hardness)))
    asked = [_ask(rng, facts) for _i in range(rng.randint(2, 3))]
    turns = _opening(rng, notes_text(facts), [Turn("user", question) for question, _ in asked])
    return [*turns, Turn("assistant", " ".join(answer for _, answer in asked), _name(rng), learn=True)]


def debate(rng: random.Random, hardness: float) -> Transcript:
    """One agent's view in one round of a debate, and what it then says."""
    facts = draw_facts(rng, rng.randint(1, 2 + round(5 * hardness)))
    asked = rng.choice(facts)
    versions = [asked, with_wrong_number(rng, asked), with_wrong_number(rng, asked)]
    names = _agent_names(rng, 1 + rng.choice((0, 1, 2, 2, 2, 2, 3, 4)))
    me, others = names[0], names[1:]
    my_notes = None if rng.random() < 0.15 else [rng.choice(versions) if f is asked else f for f in facts]
    if my_notes and rng.random() < 0.1:
        my_notes = [fact for fact in my_notes if fact.person != asked.person]
    mine = next((f.sentence() for f in my_notes or [] if f.person == asked.person), UNKNOWN)

    notes = notes_text(rng.sample(my_notes, len(my_notes))) if my_notes else None
    turns = _opening(rng, notes, [Turn("user", question_about(asked.person))])
    rounds = rng.choice((1, 2, 2, 3, 3, 4)) if others else 1
    spoke_before = rounds > 1 and rng.random() < 0.8
    others_last = [_position(rng, versions) for _ in others]
    if not spoke_before:
        # A judge, or one who speaks for the first time after the others: its notes count as one voice.
        turns += _heard(rng, others, others_last, rounds if others else 0)
        return [*turns, Turn("assistant", plurality(mine, others_last), me, learn=True)]

    turns.append(Turn("assistant", mine, me, learn=True))
    own = mine
    for _ in range(2, rounds):
        # Earlier rounds of one's own stay in view, those of the others have been replaced by their last.
        own = revise(own, [_position(rng, versions) for _ in others])
        turns.append(Turn("assistant", own, me))
        own = first_sentence(own)
    turns += _heard(rng, others, others_last, rounds - 1)
    return [*turns, Turn("assistant", revise(own, others_last), me, learn=True)]


TASKS: dict[str, Callable[[random.Random, float], Transcript]] = {
    "induction": induction,
    "recall": recall,
    "several_questions": several_questions,
    "debate": debate,
}
"""Each draws a transcript from a generator and a hardness between 0 and 1."""


def _opening(rng: random.Random, notes: str | None, questions: Transcript) -> Transcript:
    """Rules now and then, notes and questions: mostly in this order, but what to read may also follow what is asked."""
    rules = [Turn("system", DEBATE_RULES)] if rng.random() < 0.5 else []
    if notes is None:
        return [*rules, *questions]
    turn = Turn("system" if rng.random() < 0.8 else "user", notes)
    return [*rules, *questions, turn] if rng.random() < 0.35 else [*rules, turn, *questions]


def _ask(rng: random.Random, facts: list[Fact]) -> tuple[str, str]:
    if rng.random() < 0.1:
        absent = rng.choice([p for p in vocabulary.PEOPLE if all(p != fact.person for fact in facts)])
        return question_about(absent), UNKNOWN
    fact = rng.choice(facts)
    return question_about(fact.person), fact.sentence()


def _name(rng: random.Random) -> str | None:
    return None if rng.random() < 0.4 else _agent_names(rng, 1)[0]


def _agent_names(rng: random.Random, count: int) -> list[str]:
    """Mostly the language's own names; now and then a word of the user's that only bytes can spell."""
    names = rng.sample(vocabulary.AGENTS, count)
    if rng.random() < 0.1:
        letters = "abcdefghijklmnopqrstuvwxyz_"
        names = ["".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(count)]
    return names


def _position(rng: random.Random, versions: list[Fact]) -> str:
    return UNKNOWN if rng.random() < 0.08 else rng.choice(versions).sentence()


def _heard(rng: random.Random, names: list[str], answers: list[str], round_: int) -> Transcript:
    """The others' last answers; after the first round they may carry a remark."""
    turns: Transcript = []
    for name, answer in zip(names, answers, strict=True):
        remark = rng.choice((AGREE, KEEP, CHANGE)) if round_ > 1 and answer != UNKNOWN else ""
        turns.append(Turn("assistant", f"{answer} {remark}".strip(), name))
    return turns
