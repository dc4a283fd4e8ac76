"""Scores about branches as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_bench.evaluation import Difference, Score
from choreo_bench.experiments.eval_synthesis.contenders import Contender
from choreo_bench.experiments.eval_synthesis.sweeps import SWEPT, changed
from choreo_bench.language.synthesis import FROM_TRUNK, HELD_OUT, SYNTHESIS_TASKS

Scores = Mapping[tuple[str, str], Sequence[float]]
"""By the names of contender and task."""
LAYOUTS: tuple[SynthesisLayout, ...] = ("parallel", "sequential")
"""Those in which a trained contender is set against text."""
SLACK = 0.01
"""By which a merge from caches may fall behind text."""


@dataclass(frozen=True)
class Verdict:
    """How one layout of a trained contender stands to text on one task."""

    task: str
    layout: str
    share: float
    difference: Difference

    @property
    def met(self) -> bool:
        """Whether it is at most a point worse."""
        return self.difference.share >= -SLACK


def verdicts(scores: Scores, kind: str = "full") -> list[Verdict]:
    """Each layout that was played against text, task by task and problem by problem."""
    found: list[Verdict] = []
    for task in SYNTHESIS_TASKS:
        text = scores.get(("text", task))
        for layout in LAYOUTS:
            own = scores.get((f"{kind}, {layout}", task))
            if own is not None and text is not None:
                difference = Difference.of([score == 1 for score in own], [score == 1 for score in text])
                found.append(Verdict(task, layout, mean(own), difference))
    return found


def ablation_lines(scores: Scores, contenders: Sequence[Contender]) -> list[str]:
    """Tasks down, contenders across, and the means of all tasks."""
    names = [contender.name for contender in contenders]
    lines = [f"| task | {' | '.join(names)} |", "|---" + "|--:" * len(names) + "|"]
    tasks = [task for task in SYNTHESIS_TASKS if any((name, task) in scores for name in names)]
    for task in tasks:
        lines.append(f"| {_marked(task)} | {' | '.join(_cell(scores.get((name, task))) for name in names)} |")
    means = [[mean(scores[name, task]) for task in tasks if (name, task) in scores] for name in names]
    return [*lines, f"| **mean** | {' | '.join(f'{100 * mean(each):.1f}' if each else '' for each in means)} |"]


def verdict_lines(scores: Scores, chosen: str | None = None) -> list[str]:
    """Each layout against text, with the interval that inverts McNemar's test; the chosen one in bold."""
    lines = [
        "| task | layout | full, % | text, % | difference | a point worse at most |",
        "|---|---|--:|--:|--:|---|",
    ]
    for each in verdicts(scores):
        low, high = each.difference.score_interval()
        text, met = each.share - each.difference.share, "yes" if each.met else "no"
        layout = f"**{each.layout}**" if each.layout == chosen else each.layout
        lines.append(
            f"| {_marked(each.task)} | {layout} | {100 * each.share:.1f} | {100 * text:.1f} | "
            f"{100 * each.difference.share:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) | {met} |"
        )
    return lines


def sweep_lines(scores: Scores, title: str, asked: Mapping[int | str, Sequence[str]]) -> list[str]:
    """Mean shares of all tasks by how many or how long branches are, and of each task."""
    names = [contender.name for contender in SWEPT]
    lines = [f"| {title} | {' | '.join(names)} | problems |", "|---" + "|--:" * (len(names) + 1) + "|"]
    for value, tasks in asked.items():
        cells, problems = [], 0
        for name in names:
            known = [scores[name, task] for task in tasks if (name, task) in scores]
            cells.append(f"{100 * mean(mean(each) for each in known):.1f}" if known else "")
            problems = max(problems, sum(len(each) for each in known))
        lines.append(f"| {value} | {' | '.join(cells)} | {problems} |")
    return lines


def order_lines(scores: Scores, asked: Mapping[int | str, Sequence[str]]) -> list[str]:
    """How often a verdict depends on the order of the branches."""
    lines = ["| | share solved, by order | verdict depends on the order, % |", "|---|---|--:|"]
    for contender in SWEPT:
        by_order = [
            [score for task in tasks for score in scores.get((contender.name, task), ())] for tasks in asked.values()
        ]
        if all(by_order):
            shares = ", ".join(f"{100 * mean(each):.1f}" for each in by_order)
            lines.append(f"| {contender.name} | {shares} | {100 * changed(by_order):.1f} |")
    return lines


def _cell(scores: Sequence[float] | None) -> str:
    if scores is None:
        return ""
    score = Score(int(sum(scores)), len(scores))
    low, high = score.interval()
    return f"{100 * score.share:.1f} ({100 * low:.0f}-{100 * high:.0f})"


def _marked(task: str) -> str:
    return f"{task} (held out)" if task == HELD_OUT else f"{task}*" if task in FROM_TRUNK else task
