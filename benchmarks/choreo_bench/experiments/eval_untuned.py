"""Tables 1, 2 and 4 of Prompt Choreography on the embedded language: what a model that was not trained to read caches
makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from choreo_agents.models import LoadedModel
from choreo_agents.sampling import Sampling
from choreo_agents.training.journal import Journal, Record
from choreo_agents.workflows.phrasing import load_prompts
from choreo_agents.workflows.playing import PlayProgress, Setup
from choreo_bench.cases import CASES
from choreo_bench.evaluation.intervals import Interval, points
from choreo_bench.harness import Table
from choreo_bench.language import Split
from choreo_bench.playing import PlayReport, VariantOutcome, draw_items, play_all


@dataclass(frozen=True)
class Trial:
    """A workflow as it is played for a table."""

    name: str
    """In the table."""
    table: int
    """Of the paper."""
    case: str
    variants: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """To the workflow's default options."""
    competitor: str = ""
    """The trial whose baseline it should beat on the same items: a single call."""


TRIALS = (
    Trial("MultiQA", 1, "multi_qa", ("baseline", "serial", "parallel")),
    Trial("BSM", 2, "branch_solve_merge", ("baseline", "serial", "parallel")),
    Trial("Direct (sums)", 4, "direct", ("baseline",)),
    Trial("MADiter", 4, "iterative_debate", ("baseline", "choreo"), competitor="Direct (sums)"),
    Trial("ToT", 4, "tree_of_thoughts", ("baseline", "choreo"), competitor="Direct (sums)"),
    Trial("Direct (notes)", 4, "direct", ("baseline",), {"task": "notes"}),
    Trial("MADpar", 4, "debate", ("baseline", "choreo"), competitor="Direct (notes)"),
)
TITLES = {
    1: "Table 1: MultiQA, both questions right",
    2: "Table 2: branch, solve, merge: concepts covered",
    4: "Table 4: right answers",
}


@dataclass(frozen=True)
class Line:
    """A row of a table: a variant of a trial."""

    trial: Trial
    outcome: VariantOutcome
    gain: tuple[float, Interval | None] | None
    """Over a single call."""

    def cells(self) -> dict[str, str]:
        """Cells of the row, by column."""
        outcome = self.outcome
        return {
            "workflow": self.trial.name,
            "method": outcome.name,
            "%": points(outcome.share, outcome.interval),
            "to the baseline": points(outcome.difference, outcome.difference_interval, signed=True),
            "to a single call": "" if self.gain is None else points(*self.gain, signed=True),
            **{part: f"{100 * share:.1f}" for part, share in outcome.parts.items()},
        }


class UntunedReport:
    """All trials of one model."""

    def __init__(
        self,
        items: Mapping[str, Sequence[str]],
        records: Mapping[str, Sequence[Record]],
        trials: Sequence[Trial] = TRIALS,
    ) -> None:
        self._items, self._records, self._trials = items, records, trials

    def lines(self, table: int) -> Iterator[Line]:
        """The lines of one of the paper's tables."""
        for trial in self._trials:
            if trial.table == table and trial.name in self._records:
                report = PlayReport(self._records[trial.name], trial.variants, self._items[trial.name])
                for outcome in report.outcomes():
                    yield Line(trial, outcome, self._gain(trial, outcome.name))

    def tables(self) -> dict[int, Table]:
        """Make those of the paper's tables that were played, by number."""
        tables: dict[int, Table] = {}
        for number, title in TITLES.items():
            if lines := list(self.lines(number)):
                # Where there is a single call to compare with, further shares are not about answers.
                gains = any(line.gain is not None for line in lines)
                parts = dict.fromkeys(part for line in lines for part in line.outcome.parts)
                columns = ["workflow", "method", "%", "to the baseline", *(["to a single call"] if gains else parts)]
                rows = [[line.cells().get(column, "") for column in columns] for line in lines]
                tables[number] = Table(columns, rows, title, words=2)
        return tables

    def as_object(self) -> dict[int, list[dict[str, Any]]]:
        """Write the lines of each table as plain JSON."""
        return {number: [asdict(line) for line in self.lines(number)] for number in TITLES}

    def _gain(self, trial: Trial, variant: str) -> tuple[float, Interval | None] | None:
        if not trial.competitor:
            return None
        own = [record | {"variant": "own"} for record in self._records[trial.name] if record["variant"] == variant]
        other = [record | {"variant": "competitor"} for record in self._records[trial.competitor]]
        return PlayReport(own + other, ["own", "competitor"], self._items[trial.name]).difference("own", "competitor")


def measure_untuned(
    model: LoadedModel,
    *,
    count: int,
    folder: Path | None,
    split: Split = "test",
    seed: int = 0,
    sampling: Sampling = Sampling(temperature=0.7, top_p=0.95, max_tokens=96),
    on_progress: Callable[[str, PlayProgress], None] = lambda trial, progress: None,
) -> UntunedReport:
    """Play every trial; one journal each in the folder, in which what is known already is not played again.

    Args:
        model: Speaks the embedded language.
        count: Items of each.
        folder: Of the journals; None keeps them in memory.
        split: Which items.
        seed: Of the first.
        sampling: Of all that is said.
        on_progress: Told how far each trial is.
    """
    items: dict[str, list[str]] = {}
    records: dict[str, list[Record]] = {}
    for trial in TRIALS:
        case = CASES[trial.case]
        options = case.options.model_validate(dict(trial.changes))
        setup = Setup(case, options, load_prompts(case.name, "embedded"), sampling)
        drawn = draw_items(case, options, count, split, seed)
        path = None if folder is None else folder / f"{'-'.join([trial.case, *trial.changes.values()])}.jsonl"
        with Journal(path, setup.as_settings(model) | {"seed": seed}) as journal:

            def advance(progress: PlayProgress, name: str = trial.name) -> None:
                on_progress(name, progress)

            play_all(
                model,
                setup,
                drawn,
                trial.variants,
                journal,
                seeds=range(seed, seed + count),
                on_progress=advance,
            )
            items[trial.name] = [item.id for item in drawn]
            records[trial.name] = list(journal.records.values())
    return UntunedReport(items, records)
