"""Private prompts of workers: notes that hold what they will say among other facts, and a turn of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from choreo_bench.language import vocabulary
from choreo_bench.language.problem import Problem, ProblemMessage
from choreo_bench.language.scoring import sentences
from choreo_bench.language.sentences import Fact, Has, Likes, Visits, draw_about
from choreo_bench.language.tasks.recall import READ

OWN_TURN = 0.3
"""Share of workers with notes that are also asked to use them."""

Told = Callable[[Problem, ProblemMessage], list[str]]
"""The sentences that a worker's notes must hold for its words to follow from them."""


def own_words(_problem: Problem, words: ProblemMessage) -> list[str]:
    """The sentences that the worker will say; of a report, without its number."""
    return sentences(words.text.partition(": ")[2] if words.role == "user" else words.text)


def with_notes(rng: random.Random, problem: Problem, branches: Sequence[str], required: Told, facts: int) -> Problem:
    """The same problem, some of whose workers have notes that nobody else sees.

    The notes do not decide its split: the same words from workers who were told something else are the same problem.

    Args:
        rng: Decides how long each worker's notes are, 0 to `facts` sentences besides what is told, and what they say.
        problem: In which the branches are given.
        branches: What workers say.
        told: What their notes hold in any case.
        facts: Sentences in the notes at most, if one is told.
    """
    spoken = {word.strip(".?:,") for message in problem.messages for word in message.text.split()}
    strangers = [person for person in vocabulary.PEOPLE if person not in spoken]
    trunk = _trunk(problem, branches)
    messages = list(problem.messages)
    for number, name in enumerate(branches, start=1):
        length = rng.randint(0, facts)
        if not length:
            continue
        words = problem.by_name[name]
        notes = required(problem, words)
        for fact in _draw_facts(rng, strangers, length - 1):
            notes.insert(rng.randint(0, len(notes)), fact.sentence())
        made = [ProblemMessage(f"notes {number}", "system", f"Notes: {' '.join(notes)}", parents=trunk)]
        own = [parent for parent in words.parents if parent not in trunk]
        if not own and rng.random() < OWN_TURN:
            made.append(ProblemMessage(f"turn {number}", "user", READ, parents=(*trunk, made[0].name)))
        messages = _told_first(messages, {name, *own}, trunk, made)
    key = problem.key or tuple(message.text for message in problem.messages if not message.is_answer)
    return replace(problem, messages=tuple(messages), key=key, branches=tuple(branches))


def _trunk(problem: Problem, branches: Sequence[str]) -> tuple[str, ...]:
    """Return the messages that every branch and the answer see, before the first branch."""
    [answer] = [message for message in problem.messages if message.is_answer]
    return answer.parents[: answer.parents.index(branches[0])]


def _told_first(
    messages: list[ProblemMessage], readers: set[str], trunk: tuple[str, ...], made: Sequence[ProblemMessage]
) -> list[ProblemMessage]:
    """The messages with new ones before the first of their readers, who see them right after the trunk."""
    names = tuple(message.name for message in made)
    changed: list[ProblemMessage] = []
    for message in messages:
        if message.name not in readers:
            changed.append(message)
            continue
        if made[0] not in changed:
            changed += made
        changed.append(replace(message, parents=(*trunk, *names, *message.parents[len(trunk) :])))
    return changed


def _draw_facts(rng: random.Random, people: Sequence[str], count: int) -> list[Fact]:
    """Facts about different people, as far as there are so many."""
    kinds: tuple[type[Fact], ...] = (Has, Visits, Likes)
    return [draw_about(rng, person, rng.choice(kinds)) for person in rng.sample(people, min(count, len(people)))]
