"""Scores about branches as tables and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_bench.evaluation import Difference, Score
from choreo_bench.evaluation.intervals import points
from choreo_bench.experiments.eval_synthesis.measure import SWEPT, Contender, changed
from choreo_bench.harness import Report, Table
from choreo_bench.language.synthesis import FROM_TRUNK, HELD_OUT, SYNTHESIS_TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores = Mapping[tuple[str, str], Sequence[float]]
"""By the names of contender and task."""
Asked = Mapping[int, Sequence[str]]
"""The names of what was asked in a sweep, by the value that is swept."""
LAYOUTS: tuple[SynthesisLayout, ...] = ("parallel", "sequential")
"""Those in which a trained contender is set against text."""
SLACK = 0.01
"""By which a merge from caches may fall behind text."""
SWEEPS = {"branches": "branches (trained on up to 8)", "length": "things said in each branch"}
"""What is drawn, and how its axis is called."""


@dataclass(frozen=True)
class Verdict:
    """Difference between one layout of a trained contender and text, on one task."""

    task: str
    layout: str
    share: float
    difference: Difference

    @property
    def met(self) -> bool:
        """True if it is at most a point worse."""
        return self.difference.share >= -SLACK


def verdicts(scores: Scores, kind: str = "full") -> list[Verdict]:
    """Each layout that was played against text, task by task and problem by problem."""
    results: list[Verdict] = []
    for task in SYNTHESIS_TASKS:
        text = scores.get(("text", task))
        for layout in LAYOUTS:
            own = scores.get((f"{kind}, {layout}", task))
            if own is not None and text is not None:
                difference = Difference.of([score == 1 for score in own], [score == 1 for score in text])
                results.append(Verdict(task, layout, mean(own), difference))
    return results


def ablation_table(scores: Scores, contenders: Sequence[Contender]) -> Table:
    """Set tasks down, contenders across, and the means of all tasks."""
    names = [contender.name for contender in contenders]
    tasks = [task for task in SYNTHESIS_TASKS if any((name, task) in scores for name in names)]
    rows = [[_marked(task), *(_cell(scores.get((name, task))) for name in names)] for task in tasks]
    means = [[mean(scores[name, task]) for task in tasks if (name, task) in scores] for name in names]
    rows.append(["**mean**", *(f"{100 * mean(scores_of):.1f}" if scores_of else "" for scores_of in means)])
    return Table(["task", *names], rows, "What each part is worth: solved, %; in brackets 95 % intervals")


def verdict_table(scores: Scores, chosen: str | None = None) -> Table:
    """Set each layout against text, with the interval that inverts McNemar's test; the chosen one in bold."""
    rows = []
    for verdict in verdicts(scores):
        shares = (f"{100 * share:.1f}" for share in (verdict.share, verdict.share - verdict.difference.share))
        difference = points(verdict.difference.share, verdict.difference.score_interval(), signed=True)
        layout = f"**{verdict.layout}**" if verdict.layout == chosen else verdict.layout
        rows.append([_marked(verdict.task), layout, *shares, difference, "yes" if verdict.met else "no"])
    columns = ["task", "layout", "full, %", "text, %", "difference", "a point worse at most"]
    return Table(columns, rows, "Against text, problem by problem", words=2)


def sweep_table(scores: Scores, title: str, swept: Asked) -> Table:
    """Make a row of mean shares of all tasks for how many or how long branches are."""
    names = [contender.name for contender in SWEPT]
    rows = []
    for value, tasks in swept.items():
        known = [[scores[name, task] for task in tasks if (name, task) in scores] for name in names]
        shares = (f"{100 * mean(mean(task) for task in shares_of):.1f}" if shares_of else "" for shares_of in known)
        rows.append([str(value), *shares, str(max(sum(map(len, shares_of)) for shares_of in known))])
    return Table([title, *names, "problems"], rows, f"By {title}")


def order_table(scores: Scores, swept: Asked) -> Table:
    """Say how often a verdict depends on the order of the branches."""
    rows = []
    for contender in SWEPT:
        by_order = [
            [score for task in tasks for score in scores.get((contender.name, task), ())] for tasks in swept.values()
        ]
        if all(by_order):
            shares = ", ".join(f"{100 * mean(solved):.1f}" for solved in by_order)
            rows.append([contender.name, shares, f"{100 * changed(by_order):.1f}"])
    columns = ["", "share solved, by order", "verdict depends on the order, %"]
    return Table(columns, rows, "By the order of branches", words=2)


@dataclass(frozen=True)
class MergeReport:
    """Results of all contenders.

    Args:
        weights: Digest of the model's.
        contenders: Who answered.
        scores: Of all tasks.
        swept: Of the sweeps.
        sweeps: Tasks that were asked in each sweep, by its title.
        layout: The one whose training solved more development problems.
    """

    weights: str
    contenders: Sequence[Contender]
    scores: Scores
    swept: Scores = field(default_factory=dict)
    sweeps: Mapping[str, Asked] = field(default_factory=dict)
    layout: SynthesisLayout | None = None

    def report(self) -> Report:
        """Report all tables; mean shares by contender and task as plain JSON."""
        tables = [ablation_table(self.scores, self.contenders)]
        tables += [verdict_table(self.scores, self.layout)] if verdicts(self.scores) else []
        tables += [sweep_table(self.swept, title, self.sweeps[title]) for title in SWEEPS if title in self.sweeps]
        tables += [order_table(self.swept, self.sweeps["order"])] if "order" in self.sweeps else []
        bold = "in bold the layout whose training solved more development problems, over all tasks"
        return Report(
            tables,
            _means(self.scores) | {"sweeps": {title: self._swept_in(title) for title in self.sweeps}},
            f"Weights: `{self.weights[:16]}`.",
            [] if self.layout is None else [bold],
        )

    def _swept_in(self, title: str) -> dict[str, Any]:
        task_names = {name for names in self.sweeps[title].values() for name in names}
        return _means({key: shares for key, shares in self.swept.items() if key[1] in task_names})

    def figure(self) -> Figure:
        """Draw the mean share of solved problems by number and by length of branches."""
        titles = [title for title in SWEEPS if title in self.sweeps]
        from matplotlib.figure import Figure  # noqa: PLC0415 - only who draws needs it

        figure = Figure(figsize=(4.4 * len(titles), 3.4), layout="constrained")
        axes = figure.subplots(1, len(titles), squeeze=False, sharey=True)[0]
        for axis, title in zip(axes, titles, strict=True):
            for number, contender in enumerate(SWEPT):
                drawn: dict[int, float] = {}
                for place, tasks in enumerate(self.sweeps[title].values()):
                    known = [self.swept[contender.name, task] for task in tasks if (contender.name, task) in self.swept]
                    if known:
                        drawn[place] = 100 * mean(mean(shares) for shares in known)
                if drawn:
                    axis.plot(list(drawn), list(drawn.values()), marker="o", color=f"C{number}", label=contender.name)
            axis.set_xticks(range(len(self.sweeps[title])), [str(value) for value in self.sweeps[title]])
            axis.set_xlabel(SWEEPS[title])
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("solved, % (mean of tasks)")
        axes[0].legend()
        return figure


def _means(scores: Scores) -> dict[str, Any]:
    return {f"{who} | {what}": mean(values) for (who, what), values in scores.items()}


def _cell(scores: Sequence[float] | None) -> str:
    return "" if scores is None else str(Score(int(sum(scores)), len(scores)))


def _marked(task: str) -> str:
    return f"{task} (held out)" if task == HELD_OUT else f"{task}*" if task in FROM_TRUNK else task
