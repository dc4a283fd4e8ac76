"""Tables 1 to 4 of Prompt Choreography on the embedded language, with what distillation gives back."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.files import write_text
from choreo_agents.sampling import Sampling
from choreo_agents.training.journal import Journal, Record
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.tuning import CARD_FILE
from choreo_agents.workflows.phrasing import load_prompts
from choreo_agents.workflows.playing import PlayProgress, Setup
from choreo_bench.cases import CASES
from choreo_bench.distilling.teaching import Amounts, DistillResult, Watcher, teach
from choreo_bench.distilling.traces import DistillConfig
from choreo_bench.experiments.eval_dilemma import DilemmaReport, measure_dilemma
from choreo_bench.experiments.eval_untuned import Trial, UntunedReport
from choreo_bench.harness import Report, Table
from choreo_bench.playing import TUNED_SUFFIX, draw_items, play_all

SAMPLING = Sampling(temperature=0.7, top_p=0.95, max_tokens=96)
SETTINGS = TuneSettings(learning_rate=5e-3, batch_tokens=1024, epochs=16, patience=6)
"""As `choreo train distill` has them for the embedded model."""


@dataclass(frozen=True)
class DistillPlan:
    """A distillation for a table: the workflow, its number of traces and of epochs."""

    name: str
    """Of its folder."""
    case: str
    variant: str
    changes: tuple[tuple[str, Any], ...] = ()
    traces: int = 400
    epochs: int = 16
    held_out: int = 64
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else is not as in `SETTINGS`."""
    source: str | None = None
    """The workflow whose last words are taught to this one."""

    def lesson(self) -> DistillConfig:
        return DistillConfig(
            _setup(self.case, self.changes), self.variant, None if not self.source else _setup(self.source)
        )


_TAUGHT = {"imitation": 0.7, "final_rate": 0.0, "keep": "last"}
"""Where a few words decide, and scores of few items cannot tell which epoch was best: the baseline's distributions are
learnt, which say more than the words that were drawn from them, and the run goes on until its rates are nothing."""
COURSES = {
    course.name: course
    for course in (
        DistillPlan("multi_qa-serial", "multi_qa", "serial"),
        DistillPlan("multi_qa-parallel", "multi_qa", "parallel", (("both_orders", True),), 500, 24, settings=_TAUGHT),
        DistillPlan("branch_solve_merge-parallel", "branch_solve_merge", "parallel", traces=300),
        DistillPlan(
            "prisoners_dilemma", "prisoners_dilemma", "choreo", (("every_strategy", True),), 500, 10, settings=_TAUGHT
        ),
        DistillPlan("debate", "debate", "choreo", traces=300, epochs=6),
        DistillPlan("tree_of_thoughts", "tree_of_thoughts", "choreo", traces=100, epochs=4),
        DistillPlan("iterative_debate", "iterative_debate", "choreo", traces=300, epochs=6),
        DistillPlan("direct-debate", "direct", "choreo", (("task", "notes"),), 300, 6, source="debate"),
        DistillPlan("direct-tree_of_thoughts", "direct", "choreo", (), 300, 6, source="tree_of_thoughts"),
        DistillPlan("direct-iterative_debate", "direct", "choreo", (), 300, 6, source="iterative_debate"),
    )
}
TRIALS = (
    Trial("MultiQA", 1, "multi_qa", ("baseline", "serial", "serial + tuned", "parallel", "parallel + tuned")),
    Trial("BSM", 2, "branch_solve_merge", ("baseline", "serial", "parallel", "parallel + tuned")),
    Trial("Direct (sums)", 4, "direct", ("baseline",)),
    Trial("MADiter", 4, "iterative_debate", ("baseline", "choreo", "choreo + tuned"), competitor="Direct (sums)"),
    Trial("ToT", 4, "tree_of_thoughts", ("baseline", "choreo", "choreo + tuned"), competitor="Direct (sums)"),
    Trial("MADiter, distilled", 4, "direct", ("baseline", "choreo + tuned"), competitor="Direct (sums)"),
    Trial("ToT, distilled", 4, "direct", ("baseline", "choreo + tuned"), competitor="Direct (sums)"),
    Trial("Direct (notes)", 4, "direct", ("baseline",), {"task": "notes"}),
    Trial("MADpar", 4, "debate", ("baseline", "choreo", "choreo + tuned"), competitor="Direct (notes)"),
    Trial("MADpar, distilled", 4, "direct", ("baseline", "choreo + tuned"), {"task": "notes"}, "Direct (notes)"),
)
_COURSE_OF = {
    ("MultiQA", "serial"): "multi_qa-serial",
    ("MultiQA", "parallel"): "multi_qa-parallel",
    ("BSM", "parallel"): "branch_solve_merge-parallel",
    ("MADiter", "choreo"): "iterative_debate",
    ("ToT", "choreo"): "tree_of_thoughts",
    ("MADpar", "choreo"): "debate",
    ("MADiter, distilled", "choreo"): "direct-iterative_debate",
    ("ToT, distilled", "choreo"): "direct-tree_of_thoughts",
    ("MADpar, distilled", "choreo"): "direct-debate",
}


_DILEMMA = "prisoners_dilemma"


@dataclass(frozen=True)
class TunedReport:
    """All tables."""

    played: UntunedReport
    dilemma: DilemmaReport | None
    cards: dict[str, dict[str, Any]]
    """What each course took, by name."""

    def report(self, weights: str) -> Report:
        """Report all tables, before and after distillation, and what was trained for them."""
        tables = self.played.tables()
        if self.dilemma is not None:
            tables[3] = replace(self.dilemma.table(), title="Table 3: how often Bob cooperates")
        tables_json = {"tables": self.played.as_object(), "dilemma": self.dilemma and asdict(self.dilemma)}
        head = f"Weights: `{weights[:16]}`. In brackets 95 % intervals; of table 3 of the difference to the baseline."
        shown = [table for _, table in sorted(tables.items())]
        return Report([*shown, self._courses()], tables_json | {"cards": self.cards}, head)

    def _courses(self) -> Table:
        rows = []
        for name, card in self.cards.items():
            before, best = card["untuned"], card["best"]
            counts = (card["traces"]["traces"], card["best_epoch"], card["steps"])
            scores = (f"{before[key]:.3f} to {best[key]:.3f}" for key in ("loss", "score"))
            rows.append((name, f"{card['share_of_model']:.1%}", *map(str, counts), *scores, f"{card['minutes']:.1f}"))
        columns = ["adapter", "share of the model", "traces", "best epoch", "steps", "held-out loss", "held-out score"]
        return Table([*columns, "minutes"], rows, "What was trained")


def measure_tuned(
    model: LoadedModel,
    *,
    count: int,
    folder: Path,
    seed: int = 0,
    only: Collection[str] | None = None,
    watcher: Callable[[str], Watcher],
    on_progress: Callable[[str, PlayProgress], None] = lambda trial, progress: None,
    on_game: Callable[[str], None] = lambda variant: None,
    command: str = "",
) -> TunedReport:
    """Distil what is not distilled yet, then play what is not played yet.

    Args:
        model: Speaks the embedded language.
        count: Items of each trial.
        folder: Of runs, adapters and journals: started again, it goes on there.
        seed: Of the first item.
        only: Workflows, and what they are set against; None: all.
        watcher: Hears of a course, by its name.
        on_progress: Told how far each trial is.
        on_game: Told of every game of the dilemma.
        command: For the cards.
    """
    courses, trials = {name: c for name, c in COURSES.items() if only is None or c.case in only}, trials_of(only)
    taught = {name: teach_plan(model, course, folder, watcher(name), command) for name, course in courses.items()}
    items: dict[str, list[str]] = {}
    records: dict[str, list[Record]] = {}
    for trial in trials:
        setup = _setup(trial.case, tuple(trial.changes.items()))
        drawn = draw_items(setup.case, setup.options, count, "test", seed)
        path = folder / "played" / f"{trial.name.replace(', ', '-').replace(' ', '-')}.jsonl"
        with Journal(path, setup.as_settings(model) | {"seed": seed}) as journal:
            for variant in trial.variants:
                plain = variant.removesuffix(TUNED_SUFFIX)
                adapter = taught[_COURSE_OF[trial.name, plain]].out if plain != variant else None

                def advance(progress: PlayProgress, name: str = trial.name) -> None:
                    on_progress(name, progress)

                play_all(
                    model,
                    setup,
                    drawn,
                    [variant],
                    journal,
                    seeds=range(seed, seed + count),
                    on_progress=advance,
                    adapter=adapter,
                )
            items[trial.name] = [item.id for item in drawn]
            records[trial.name] = list(journal.records.values())
    dilemma = None
    if _DILEMMA in taught:
        dilemma = _dilemma(model, count, seed, taught[_DILEMMA].out, folder, on_game)
    return TunedReport(UntunedReport(items, records, trials), dilemma, {name: t.card for name, t in taught.items()})


def workflows_named(names: str | None) -> frozenset[str] | None:
    """Find workflows of the tables, with commas between; None: all. Raises `InvalidRequestError`."""
    if names is None:
        return None
    known = {course.case for course in COURSES.values()}
    wanted = [name.strip() for name in names.split(",")]
    if unknown := [name for name in wanted if name not in known]:
        raise InvalidRequestError(f"the tables have no workflow {unknown[0]!r}: use some of {', '.join(sorted(known))}")
    return frozenset(wanted)


def trials_of(only: Collection[str] | None) -> tuple[Trial, ...]:
    """The trials of these workflows, and the single calls that they are set against."""
    wanted = [trial for trial in TRIALS if only is None or trial.case in only]
    competitors = {trial.competitor for trial in wanted}
    return tuple(trial for trial in TRIALS if trial in wanted or trial.name in competitors)


def teach_plan(model: LoadedModel, course: DistillPlan, folder: Path, watcher: Watcher, command: str) -> DistillResult:
    """Distil one plan, or find it distilled."""
    return teach(
        model,
        course.lesson(),
        TuneSettings.model_validate({**SETTINGS.model_dump(), "epochs": course.epochs, **course.settings}),
        Amounts(traces=course.traces, held_out=course.held_out),
        run=folder / course.name,
        out=folder / course.name / "adapter",
        watcher=watcher,
        command=command,
    )


def _dilemma(
    model: LoadedModel, games: int, seed: int, adapter: Path, folder: Path, on_game: Callable[[str], None]
) -> DilemmaReport:
    path = folder / "played" / "dilemma.json"
    card = (adapter / CARD_FILE).read_text()
    wanted = {"games": games, "seed": seed, "weights": model.adapter.weights, "card": card}
    if path.exists():
        try:
            known = json.loads(path.read_text())
            if known["wanted"] == wanted:
                return DilemmaReport(**known["report"])
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(f"{str(path)!r} is not a file of results: remove it") from error
    variants: Sequence[Any] = ("baseline", "choreo")
    report = measure_dilemma(
        model, games=games, seed=seed, variants=variants, temperature=0.7, adapter=adapter, on_progress=on_game
    )
    write_text(path, json.dumps({"wanted": wanted, "report": asdict(report)}))
    return report


def _setup(case: str, changes: Sequence[tuple[str, Any]] = ()) -> Setup:
    entry = CASES[case]
    return Setup(entry, entry.options.model_validate(dict(changes)), load_prompts(entry.name, "embedded"), SAMPLING)
