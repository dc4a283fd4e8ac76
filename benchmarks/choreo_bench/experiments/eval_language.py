"""Accuracy of a model on the embedded language by task, in ordinary prompts and from caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from choreo_agents.engine import Engine, Memory
from choreo_agents.engine.settings import MethodName
from choreo_agents.models import LoadedModel
from choreo_bench.evaluation import Layout, Score, TaskResult, VoteResult, evaluate, sample_and_vote
from choreo_bench.harness import Report, Table
from choreo_bench.language import TASKS, Split

View = Literal["ordinary", "serial", "parallel"]
"""Ordinary prompts; every message's own encoding, one after the other; the same with siblings at one offset."""
VIEWS: tuple[View, ...] = get_args(View)
_SETTINGS: Mapping[View, tuple[MethodName, Layout]] = {
    "ordinary": ("baseline", "sequential"),
    "serial": ("choreo", "sequential"),
    "parallel": ("choreo", "parallel"),
}
SAMPLED = "arithmetic"
"""The task whose single samples and votes are compared."""
SAMPLES, TEMPERATURE = 8, 0.7
BARS: Mapping[str, float] = dict.fromkeys(
    (
        "recall",
        "two_questions",
        "three_questions",
        "branch_solve_merge",
        "majority_vote",
        "best_supported",
        "list_union",
    ),
    0.98,
) | {
    "sum_of_parts": 0.95,
    "two_hop": 0.95,
    "conflict": 0.95,
    "diagnosis": 0.95,
    "multi_document": 0.95,
    "choose_by_value": 0.85,
}
"""What the embedded model is held to in ordinary prompts."""
HEADINGS: Mapping[View, str] = {
    "ordinary": "ordinary prompts",
    "serial": "caches, in sequence",
    "parallel": "caches, one offset",
}
NOT_SCORED = ("debate_turn",)
"""Tasks that are for training only."""
KV_BUDGET_BYTES = 1 << 29


@dataclass(frozen=True)
class LanguageReport:
    """Results, and the weights that they were measured on."""

    model: str
    fingerprint: str
    """Digest of the weights as loaded."""
    split: Split
    count: int
    seed: int
    results: Mapping[View, Mapping[str, TaskResult]]
    vote: VoteResult | None
    """Arithmetic at temperature 0.7 in ordinary prompts: one sample against the vote over eight."""

    def as_object(self) -> dict[str, Any]:
        """Convert the results to plain JSON."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "split": self.split,
            "n": self.count,
            "seed": self.seed,
            "views": {
                view: {
                    task: _score_object(result.solved)
                    | {"share_right": result.share_right, "bar": self._bar(view, task)}
                    | ({} if result.parsable is None else {"parsable": result.parsable.share})
                    for task, result in results.items()
                }
                for view, results in self.results.items()
            },
            "arithmetic_sampled": None
            if self.vote is None
            else {
                "temperature": TEMPERATURE,
                "samples": SAMPLES,
                "single": _score_object(self.vote.single),
                "every_sample": self.vote.every.share,
                "vote": _score_object(self.vote.vote),
                "gain": {"share": self.vote.gain.share, "interval": self.vote.gain.interval()},
            },
        }

    def _bar(self, view: View, task: str) -> float | None:
        return BARS.get(task) if view == "ordinary" and self.model == "embedded" else None

    def report(self) -> Report:
        """Report accuracy by task and view, then samples against votes."""
        tables = [Table(*self._accuracy(), f"{self.model}: {self.count} problems a task, {self.split} split")]
        if self.vote is not None:
            low, high = self.vote.gain.interval()
            rows = [
                ["one sample", _words(self.vote.single)],
                [f"vote over {SAMPLES} samples", _words(self.vote.vote)],
                ["gain", f"{self.vote.gain.share:+.3f} ({low:+.2f} to {high:+.2f})"],
            ]
            tables.append(Table(["", "right"], rows, f"arithmetic at temperature {TEMPERATURE}, ordinary prompts"))
        head = (
            f"Weights: `{self.fingerprint}`. Seeds {self.seed} to {self.seed + self.count - 1} of the {self.split} "
            f"split, {self.count} problems a task, temperature 0; in brackets Wilson's 95 % interval."
        )
        return Report(tables, self.as_object(), head)

    def _accuracy(self) -> tuple[list[str], list[list[str]]]:
        views = list(self.results)
        bars = "ordinary" in views and self.model == "embedded"
        rows: list[list[str]] = []
        for task in self.results[views[0]]:
            name, results = task.replace("_", " "), [self.results[view][task] for view in views]
            bar = self._bar("ordinary", task)
            met = bar is not None and self.results["ordinary"][task].solved.share >= bar
            bar_text = "" if bar is None else f"{bar:.2f} {'met' if met else 'missed'}"
            rows.append([name, *(_words(result.solved) for result in results), *([bar_text] if bars else [])])
            if any(result.parsable is not None for result in results):
                cells = ("" if result.parsable is None else _words(result.parsable) for result in results)
                rows.append([f"{name}, readable", *cells, *([""] if bars else [])])
        return ["task", *(HEADINGS[view] for view in views), *(["bar"] if bars else [])], rows


def _words(score: Score) -> str:
    low, high = score.interval()
    return f"{score.share:.3f} ({low:.2f}-{high:.2f})"


def _score_object(score: Score) -> dict[str, Any]:
    """A score as plain JSON."""
    return {"right": score.right, "count": score.count, "share": score.share, "interval": score.interval()}


def measure(
    model: LoadedModel,
    *,
    tasks: Sequence[str] = (),
    views: Sequence[View] = ("ordinary",),
    count: int = 500,
    split: Split = "test",
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> LanguageReport:
    """Play `count` problems of each task in each view.

    Args:
        model: Any model; only the embedded one has learnt the language.
        tasks: By name; all scored ones if empty.
        views: How messages reach their readers.
        count: Problems of each task.
        split: Which problems.
        seed: Of the first problem.
        on_progress: Called with the view's name after every problem; as `vote` after every sample.

    Raises:
        ValueError: There is no task of that name.
    """
    chosen = require_tasks(tasks)
    results: dict[View, Mapping[str, TaskResult]] = {}
    vote: VoteResult | None = None
    fingerprint = ""
    for view in views:
        method, layout = _SETTINGS[view]
        with Engine.load(model, method=method, memory=Memory(kv_budget_bytes=KV_BUDGET_BYTES)) as engine:
            fingerprint = engine.model.adapter.fingerprint
            results[view] = evaluate(
                engine,
                [TASKS[name] for name in chosen],
                count=count,
                split=split,
                layout=layout,
                seed=seed,
                on_progress=partial(_played, on_progress, view),
            ).results
            if view == "ordinary" and SAMPLED in chosen:
                vote = sample_and_vote(
                    engine,
                    TASKS[SAMPLED],
                    count=count,
                    samples=SAMPLES,
                    temperature=TEMPERATURE,
                    split=split,
                    seed=seed,
                    on_progress=lambda: on_progress("vote"),
                )
    return LanguageReport(model.name, fingerprint, split, count, seed, results, vote)


def _played(on_progress: Callable[[str], None], view: View, _task: str) -> None:
    on_progress(view)


def require_tasks(names: Sequence[str]) -> list[str]:
    """The tasks to score, all of them if none is named.

    Raises:
        ValueError: There is no task of that name.
    """
    unknown = sorted(set(names) - set(TASKS))
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}: use some of {', '.join(TASKS)}")
    return list(dict.fromkeys(names)) or [name for name in TASKS if name not in NOT_SCORED]


def require_views(names: Sequence[str]) -> list[View]:
    """The views of these names, each once.

    Raises:
        ValueError: There is no view of that name, or none is named.
    """
    named = dict.fromkeys(name.strip() for name in names)
    chosen = [view for name in named for view in VIEWS if view == name]
    unknown = sorted(set(named) - set(VIEWS))
    if unknown or not chosen:
        raise ValueError(f"unknown view {unknown[0]!r}: use some of {', '.join(VIEWS)}")
    return chosen
