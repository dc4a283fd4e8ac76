"""How well a model speaks the language: accuracy by task, in ordinary prompts and from caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

from choreo_agents.engine import Engine, Memory
from choreo_agents.engine.settings import MethodName
from choreo_agents.models import LoadedModel
from choreo_bench.evaluation import Layout, Score, TaskResult, VoteResult, evaluate, sample_and_vote
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
NOT_SCORED = ("debate_turn",)
"""Tasks that are for training only."""
KV_BUDGET_BYTES = 1 << 29


@dataclass(frozen=True)
class LanguageReport:
    """What was measured, and on which weights."""

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
        """As plain JSON."""
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "split": self.split,
            "n": self.count,
            "seed": self.seed,
            "views": {
                view: {
                    task: score_object(result.solved)
                    | {
                        "share_right": result.share_right,
                        "bar": BARS.get(task) if view == "ordinary" and self.model == "embedded" else None,
                    }
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
                "single": score_object(self.vote.single),
                "every_sample": self.vote.every.share,
                "vote": score_object(self.vote.vote),
                "gain": {"share": self.vote.gain.share, "interval": self.vote.gain.interval()},
            },
        }


def score_object(score: Score) -> dict[str, Any]:
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


def joined(reports: Sequence[LanguageReport]) -> LanguageReport:
    """One report of several that measured the same problems in different views."""
    results = {view: result for report in reports for view, result in report.results.items()}
    vote = next((report.vote for report in reports if report.vote is not None), None)
    return replace(reports[0], results=results, vote=vote)


def _played(on_progress: Callable[[str], None], view: View, _task: str) -> None:
    on_progress(view)


def require_tasks(names: Sequence[str]) -> list[str]:
    """The tasks to score, all of them if none is named.

    Raises:
        ValueError: There is no task of that name.
    """
    unknown = sorted(set(names) - set(TASKS))
    if unknown:
        raise ValueError(f"there is no task {unknown[0]!r}: there are {', '.join(TASKS)}")
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
        raise ValueError(f"there is no view {unknown[0]!r}: there are {', '.join(VIEWS)}")
    return chosen
