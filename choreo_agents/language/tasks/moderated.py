"""A debate in turns: one side works it out, the other checks, a moderator ends it (MADiter)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from choreo_agents.language.problem import Problem, Said
from choreo_agents.language.scoring import last_sentence
from choreo_agents.language.tasks.arithmetic import CALCULATE, SLIP, Sum, check_words, draw_slips, result_words
from choreo_agents.language.tasks.base import Draft, draw_agents, up_to

GO_ON = "Go on."


@dataclass(frozen=True)
class FirstVerdict:
    """Right if the first result that the moderator names is the gold one."""

    verdicts: tuple[str, ...]
    gold: str

    def __call__(self, said: Said) -> float:
        named = [words for words in (last_sentence(said[verdict]) for verdict in self.verdicts) if words != GO_ON]
        return float(named[:1] == [self.gold])


@dataclass(frozen=True)
class ModeratedDebate:
    """An affirmative side works it out, a negative side checks, and a moderator names the result or goes on."""

    steps: int = 4
    slip: float = 0.0
    """Share of the affirmative side's steps that are off by one: for training text. A draw has as many rounds as it
    takes until they are right, three at most."""
    name: str = "moderated_debate"

    def draw(self, rng: random.Random) -> Problem:
        problem = Sum.draw(rng, self.steps)
        affirmative, negative, moderator = draw_agents(rng, 3)
        draft = Draft(CALCULATE)
        draft.add("problem", "user", problem.question())
        verdicts: list[str] = []
        gold = result_words(problem.result())
        for number in range(1, 4):
            words = problem.solution(draw_slips(rng, self.steps, self.slip))
            draft.say(f"affirmative {number}", words, affirmative)
            draft.add(f"ask negative {number}", "user", "Check it.")
            checked = check_words(words)
            draft.say(f"negative {number}", checked, negative)
            draft.add(f"ask moderator {number}", "user", "Do we agree?")
            right = checked.endswith("right.")
            verdicts.append(draft.say(f"moderator {number}", last_sentence(words) if right else GO_ON, moderator))
            if right:
                break
        return draft.done(self.name, gold, FirstVerdict(tuple(verdicts), gold))

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, steps=up_to(rng, 1, 5, hardness), slip=SLIP)
