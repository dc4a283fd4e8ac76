"""The problems that `choreo run` has without the language: twenty of each workflow's, of the split that nothing was
trained on.

`python -m choreo_bench.shipped` writes them into the product anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import chain, count
from pathlib import Path

from choreo_agents.workflows.cases import SUMS, DebateItem, Item
from choreo_bench.cases import CASES
from choreo_bench.language.scoring import sentences
from choreo_bench.language.tasks.debate import MOST_AGENTS
from choreo_bench.language.tasks.record_debate import record_debate_problem

COUNT = 20
NOTED = 4
"""Sentences in the notes of each agent."""
SHOWN = {"debate": (0, 15, 49, 95, 80, 47), "tree_of_thoughts": (122, 118, 77, 123, 80, 99)}
"""Draws that stand first, since they are worth showing: what seeds 0 to 5 play, on the embedded model as it is shipped.

In these trees the candidates have three thoughts at least, and votes are split, most of them for the right result. In
these debates at least two answers are given in the first round, one of them wrong; from seed 1 on somebody then goes
over to the right one, and most end with it under `choreo` and `baseline`. A draw stands here if that is so on kernels
of other widths, too. All others are as they come: mostly right.
"""


def shipped() -> Mapping[str, Sequence[Item]]:
    """The problems, by the name of their file; no two of one file are alike."""
    draws: dict[str, Callable[[int], Item]] = {
        SUMS.get(name, name): partial(case.draw, case.options(), "test") for name, case in CASES.items()
    }
    return {name: _different(draw, SHOWN.get(name, ())) for name, draw in {**draws, "debate": _debate}.items()}


def _different(draw: Callable[[int], Item], first: Sequence[int]) -> list[Item]:
    numbers = chain(first, (number for number in count(len(first)) if number not in first))
    items: dict[str, Item] = {}
    while len(items) < COUNT:
        item = draw(next(numbers))
        items.setdefault(item.model_dump_json(exclude={"id"}), item)
    return list(items.values())


def _debate(number: int) -> DebateItem:
    """A debate of three over a record, and five more agents who noted nothing of what is asked."""
    problem = record_debate_problem(number, agents=3, noted=NOTED)
    rng = random.Random(f"more agents {number}")
    reported = [sentence for report in problem.record for sentence in sentences(report.partition(": ")[2])]
    others = [sentence for sentence in reported if sentence.split()[0] != problem.answer.split()[0]]
    start = problem.notes[0].partition(" ")[0]
    more = [" ".join([start, *rng.sample(others, NOTED)]) for _ in range(MOST_AGENTS - len(problem.notes))]
    return DebateItem(
        id=f"test {number}",
        question=problem.question,
        answer=problem.answer,
        notes=(*problem.notes, *more),
        record=problem.record,
    )


def as_lines(items: Sequence[Item]) -> str:
    """A JSON object on each line."""
    return "".join(f"{item.model_dump_json(exclude_defaults=True)}\n" for item in items)


if __name__ == "__main__":
    folder = Path(str(files("choreo_agents.workflows") / "problems"))
    folder.mkdir(exist_ok=True)
    for name, items in shipped().items():
        (folder / f"{name}.jsonl").write_text(as_lines(items))
