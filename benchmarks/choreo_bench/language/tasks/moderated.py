"""A debate in turns: one side works it out, the other checks, a moderator ends it (MADiter)."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Self

from choreo_bench.language.problem import Problem, Said
from choreo_bench.language.scoring import last_sentence
from choreo_bench.language.tasks.arithmetic import CALCULATE, Sum, check_words, result_words, taught_slip
from choreo_bench.language.tasks.base import Draft, draw_agents, up_to

GO_ON = "Go on."


VERDICT = re.compile(r"The result is \d+\.")


@dataclass(frozen=True)
class FirstVerdict:
    """Right if the first result that the moderator names is the gold one."""

    verdicts: tuple[str, ...]
    gold: str

    def __call__(self, answers: Said) -> float:
        return float(self._named(answers)[:1] == [self.gold])

    def parsable(self, answers: Said) -> bool:
        """Return whether the moderator names a result at all."""
        return any(VERDICT.fullmatch(words) for words in self._named(answers)[:1])

    def stopped(self, answers: Said) -> bool:
        """Return whether the moderator has ended the debate."""
        return bool(self._named(answers))

    def _named(self, answers: Said) -> list[str]:
        """Return the results that the moderator names, without rounds that go on."""
        last = [last_sentence(answers[verdict]) for verdict in self.verdicts if verdict in answers]
        return [words for words in last if words != GO_ON]


@dataclass(frozen=True)
class ModeratedDebate:
    """An affirmative side works it out, a negative side checks, and a moderator names the result or goes on."""

    steps: int = 4
    slip: float = 0.0
    """Share of the affirmative side's steps that are off by one: for training text, which has as many rounds as it
    takes until they are right."""
    rounds: int = 3
    """At most."""
    name: str = "moderated_debate"

    def draw(self, rng: random.Random) -> Problem:
        problem = Sum.draw(rng, self.steps)
        affirmative, negative, moderator = draw_agents(rng, 3)
        draft = Draft(CALCULATE)
        draft.add("problem", "user", problem.question())
        verdicts: list[str] = []
        gold = result_words(problem.result())
        for number in range(1, self.rounds + 1):
            words = problem.solution(problem.draw_slips(rng, self.slip))
            draft.say(f"affirmative {number}", words, affirmative)
            draft.add(f"ask negative {number}", "user", "Check it.")
            checked = check_words(words)
            draft.say(f"negative {number}", checked, negative)
            draft.add(f"ask moderator {number}", "user", "Do we agree?")
            right = checked.endswith("right.")
            verdicts.append(draft.say(f"moderator {number}", last_sentence(words) if right else GO_ON, moderator))
            if right and self.slip:
                break
        scorer = FirstVerdict(tuple(verdicts), gold)
        return draft.done(self.name, gold, scorer, key=(problem.question(),), stop=scorer.stopped)

    def varied(self, rng: random.Random, hardness: float) -> Self:
        # Without slips, what would follow the first round is never said: it is no training text.
        slip = taught_slip(hardness)
        return replace(self, steps=up_to(rng, 1, 5, hardness), slip=slip, rounds=3 if slip else 1)
