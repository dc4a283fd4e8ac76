"""Arithmetic in sentences: careless solutions, their check, and votes among them (tree of thoughts)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, Self

from choreo_bench.language.problem import Problem
from choreo_bench.language.scoring import EachExact, LastSentence, OneOf
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to

CALCULATE = "Work it out in steps."
LARGEST = 20
SLIP = 0.18
"""Share of steps in the training text that are off by one. A model that learnt it is right when it takes the likeliest
word, and slips now and then when it samples: so there is something to check, and to vote about."""


@dataclass(frozen=True)
class Sum:
    """A number and what happens to it: its steps never leave 1 to 20."""

    start: int
    steps: tuple[int, ...]
    """Added if positive, taken away if negative."""

    @classmethod
    def draw(cls, rng: random.Random, steps: int) -> Sum:
        value = start = rng.randint(2, 19)
        drawn: list[int] = []
        for _ in range(steps):
            change = rng.choice([c for c in range(-9, 10) if c and 1 <= value + c <= LARGEST])
            drawn.append(change)
            value += change
        return cls(start, tuple(drawn))

    def question(self) -> str:
        changes = " ".join(f"Add {step}." if step > 0 else f"Take {-step}." for step in self.steps)
        return f"Start at {self.start}. {changes}"

    def result(self) -> int:
        return self.start + sum(self.steps)

    def draw_slips(self, rng: random.Random, share: float) -> list[int]:
        """Draw which steps are off by one, and to which side; none of them leads below zero."""
        while True:
            slips = [rng.choice((-1, 1)) if rng.random() < share else 0 for _ in self.steps]
            changes = (step + slip for step, slip in zip(self.steps, slips, strict=True))
            if min(accumulate(changes, initial=self.start)) >= 0:
                return slips

    def worked(self, slips: Sequence[int] = ()) -> str:
        """The steps in sentences; each slip is added to what its step makes, and carried on."""
        value, words = self.start, []
        for step, slip in zip(self.steps, list(slips) + [0] * len(self.steps), strict=False):
            made = value + step + slip
            words.append(f"{value} {'plus' if step > 0 else 'minus'} {abs(step)} is {made}.")
            value = made
        return " ".join(words)

    def solution(self, slips: Sequence[int] = ()) -> str:
        """The same, and the result."""
        return f"{self.worked(slips)} {result_words(self.result() + sum(slips))}"


def taught_slip(hardness: float) -> float:
    """Slips in the training text: sums have to be known before one can be careless with them."""
    return SLIP if hardness >= 1.0 else 0.0


def result_words(value: int | str) -> str:
    return f"The result is {value}."


def check_words(solution: str) -> str:
    """Every step of a solution worked out again, up to the first that is wrong; then the verdict."""
    sentences: list[str] = []
    for sentence in solution.split(".")[:-2]:
        left, sign, right, _, made = sentence.split()
        correct = int(left) + (int(right) if sign == "plus" else -int(right))
        wrong = correct != int(made)
        sentences.append(f"{left} {sign} {right} is {correct}, {f'not {made}' if wrong else 'right'}.")
        if wrong:
            return " ".join([*sentences, "The result is wrong."])
    return " ".join([*sentences, "The result is right."])


@dataclass(frozen=True)
class Arithmetic:
    """Adding and taking away step by step."""

    steps: int = 4
    slip: float = 0.0
    """Share of steps of the shown solution that are off by one: for training text."""
    name: str = "arithmetic"

    def draw(self, rng: random.Random) -> Problem:
        problem = Sum.draw(rng, self.steps)
        slips = problem.draw_slips(rng, self.slip)
        draft = Draft(CALCULATE)
        draft.add("problem", "user", problem.question())
        [author] = draw_agents(rng, 1)
        gold = result_words(problem.result())
        answer = draft.say("answer", problem.solution(slips), author)
        return draft.done(self.name, gold, LastSentence(answer, gold), key=(problem.question(),))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, steps=up_to(rng, 1, 5, hardness), slip=taught_slip(hardness))


@dataclass(frozen=True)
class Check:
    """Somebody's solution is checked, step by step."""

    steps: int = 4
    wrong: float = 0.5
    """Share of solutions with one step off by one."""
    name: str = "check"

    def draw(self, rng: random.Random) -> Problem:
        problem = Sum.draw(rng, self.steps)
        slips = [0] * self.steps
        if rng.random() < self.wrong:
            slips[rng.randrange(self.steps)] = rng.choice((-1, 1))
        solver, checker = draw_agents(rng, 2)
        draft = Draft(CALCULATE)
        draft.add("problem", "user", problem.question())
        draft.hear([(solver, problem.solution(slips))])
        draft.add("ask", "user", "Check it.")
        gold = check_words(problem.solution(slips))
        answer = draft.say("answer", gold, checker)
        return draft.done(self.name, gold, EachExact(((answer, gold),)), key=(problem.question(),))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, steps=up_to(rng, 1, 5, hardness))


@dataclass(frozen=True)
class Choose:
    """Careless solutions side by side, at least one right: the right one is to be chosen (a voter of a tree).

    The voter works the sum out; by value, its vote names the result, by index who found it.
    """

    candidates: int = 4
    steps: int = 3
    slip: float = 0.12
    by: Literal["value", "index"] = "value"
    name: str = "choose_by_value"

    def draw(self, rng: random.Random) -> Problem:
        problem = Sum.draw(rng, self.steps)
        while True:
            drawn = [problem.solution(problem.draw_slips(rng, self.slip)) for _ in range(self.candidates)]
            right = [words.endswith(result_words(problem.result())) for words in drawn]
            if any(right):
                break
        *authors, voter = draw_agents(rng, self.candidates + 1)
        draft = Draft(CALCULATE)
        draft.add("problem", "user", problem.question())
        draft.hear(list(zip(authors, drawn, strict=True)))
        if self.by == "value":
            draft.add("ask", "user", "Which result is right?")
            votes = [f"I vote for {problem.result()}."]
        else:
            draft.add("ask", "user", "Who is right?")
            votes = [f"I vote for {author}." for author, good in zip(authors, right, strict=True) if good]
        answer = draft.say("answer", f"{problem.worked()} {rng.choice(votes)}", voter)
        return draft.done(self.name, votes[0], OneOf(answer, tuple(votes)), key=(problem.question(),))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, candidates=up_to(rng, 2, 5, hardness), steps=rng.randint(1, 4), slip=SLIP)
