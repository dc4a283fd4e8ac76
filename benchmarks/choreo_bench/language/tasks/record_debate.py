"""Debates over one record: reports that all agents read, and notes of each agent's own, some of them wrong."""

from __future__ import annotations

import random

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Split, split_of
from choreo_bench.language.sentences import Fact, Has, Likes, Visits, draw_about, notes_text, with_wrong_number
from choreo_bench.language.tasks.debate import DEBATE_RULES, DebateProblem, minority_of

FACTS = 20
"""In each report: about 98 tokens."""
REPORTS = 3 * len(vocabulary.PEOPLE) // FACTS
"""In a record, as many as there are facts for, three about each person: 885 tokens with the frames of their turns."""


def record_debate_problem(
    seed: int,
    *,
    agents: int = 3,
    reports: int = REPORTS,
    noted: int = 4,
    wrong: int | None = None,
    split: Split = "test",
) -> DebateProblem:
    """Draw a debate about one sentence of a long record.

    Each agent has noted some of the record's sentences. One has noted the one that is asked about, a minority has it
    with a wrong number, and all others have to find it in the record.

    Args:
        seed: The same seed draws the same problem.
        agents: How many agents, 2 to 8.
        reports: In the record, 1 to 9.
        noted: Sentences in each agent's notes.
        wrong: Agents whose notes give a wrong number; by default as many as still leave a strict plurality
            to the truth, whatever wrong numbers they hold.
        split: The split that its words belong to.

    Raises:
        ValueError: There are no such records or debates.
    """
    if not 1 <= reports <= REPORTS:
        raise ValueError(f"a record has 1 to {REPORTS} reports, not {reports!r}")
    if noted < 1:
        raise ValueError(f"notes need at least one sentence, not {noted!r}")
    minority = minority_of(agents)
    mistaken = minority if wrong is None else wrong
    if not 0 <= mistaken < agents:
        raise ValueError(f"at least one of {agents} agents must be right, not {mistaken!r} of them wrong")
    rng = random.Random(f"record debate {seed}")
    while True:
        problem = _draw(rng, agents, reports, noted, mistaken)
        if split_of([DEBATE_RULES, problem.question, *problem.notes, *problem.record]) == split:
            return problem


def _draw(rng: random.Random, agents: int, reports: int, noted: int, wrong: int) -> DebateProblem:
    # As many of each kind in every record, so that all records of so many reports are equally long.
    kinds: tuple[type[Fact], ...] = (Has, Visits, Likes)
    counts = [(reports * FACTS + place) // len(kinds) for place in (2, 1, 0)]
    facts = [
        draw_about(rng, person, kind)
        for kind, count in zip(kinds, counts, strict=True)
        for person in rng.sample(vocabulary.PEOPLE, count)
    ]
    topic = rng.choice([fact for fact in facts if isinstance(fact, Has)])
    rng.shuffle(facts)
    others = [fact for fact in facts if fact.person != topic.person]
    # The first of them noted it as it stands in the record.
    knowing, *mistaken = rng.sample(range(agents), 1 + wrong)
    notes: list[str] = []
    for index in range(agents):
        held = rng.sample(others, noted)
        if index == knowing:
            held[0] = topic
        elif index in mistaken:
            held[0] = with_wrong_number(rng, topic)
        rng.shuffle(held)
        notes.append(notes_text(held))
    words = [
        " ".join(fact.sentence() for fact in facts[number * FACTS : (number + 1) * FACTS]) for number in range(reports)
    ]
    return DebateProblem(
        question=topic.question(),
        answer=topic.sentence(),
        agents=vocabulary.AGENTS[:agents],
        notes=tuple(notes),
        record=tuple(f"Report {number}: {report}" for number, report in enumerate(words, start=1)),
    )
