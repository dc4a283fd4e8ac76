"""A task of your own: drawn in splits, played on an engine three ways, scored with intervals."""

import random
from dataclasses import dataclass, replace

from choreo_bench.evaluation import evaluate
from choreo_bench.language import Draft, Problem
from choreo_bench.language.scoring import FirstSentence
from choreo_bench.language.sentences import draw_facts, notes_text

from choreo_agents import Engine


@dataclass(frozen=True)
class SplitNotes:
    """Two scouts each read half of the facts aloud; one question about any of them."""

    facts: int = 3  # each: the fields of a task are its difficulty
    name: str = "split_notes"

    def draw(self, rng: random.Random) -> Problem:
        facts = draw_facts(rng, 2 * self.facts)
        draft = Draft("Answer from the notes.")
        # Neither scout has heard the other: both messages are encoded after the rules alone.
        draft.hear([("Alice", notes_text(facts[: self.facts])), ("Bruno", notes_text(facts[self.facts :]))])
        asked = rng.choice(facts)
        draft.add("question", "user", asked.question())
        answer = draft.say("answer", asked.sentence(), author="Clara")
        return draft.done(self.name, asked.sentence(), FirstSentence(answer, asked.sentence()))

    def varied(self, rng: random.Random, hardness: float) -> "SplitNotes":
        return replace(self, facts=rng.randint(1, 1 + round(4 * hardness)))


for name, method, layout in (
    ("one prompt of text", "baseline", "sequential"),
    ("caches in sequence", "choreo", "sequential"),
    ("caches at one offset", "choreo", "parallel"),
):
    with Engine.load("embedded", method=method) as engine:
        solved = evaluate(engine, [SplitNotes()], count=50, layout=layout).results["split_notes"].solved
    low, high = solved.interval()
    print(f"{name:>20}: {solved.share:.2f} right (95 % interval {low:.2f} to {high:.2f})")
