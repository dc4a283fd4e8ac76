"""A whole distillation: traces, training, the best adapter and a card that says how it came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.training.checkpoints import reserved
from choreo_agents.training.journal import Journal
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.trace import Trace, digest_of, read_traces, text_twin
from choreo_agents.training.tuned import Tuned
from choreo_agents.training.tuning import EvalScore, TrainingProgress, Tuning, run_and_keep
from choreo_bench.distilling.traces import DistillConfig, FixedExamples, adapted, sample_traces, score_played
from choreo_bench.language import Split

_LEAST_COST = 1e-3
"""In nats per token, between caches and text: what is less is noise."""
JUDGED = "judged"
"""The folder of a run in which weights lie while they are judged."""


@dataclass(frozen=True)
class Amounts:
    """Numbers of traces and items that a distillation samples and plays."""

    traces: int = 400
    """To learn from, ..."""
    held_out: int = 64
    """... and to be judged by: as traces, and as items to be played."""
    temperature: float = 1.0
    """Of the traces."""
    seed: int = 0
    """Of the first item of each."""


class Watcher(Protocol):
    """Hears of a distillation."""

    def sampling(self, split: Split, done: int, wanted: int) -> None: ...

    def left_out(self, split: Split, item: str, reason: str) -> None: ...

    def training(self, passage: TrainingProgress) -> None: ...

    def judged(self, epoch: int, held: EvalScore) -> None: ...


@dataclass(frozen=True)
class DistillResult:
    """Result of a distillation."""

    out: Path
    outcome: TrainingProgress
    card: dict[str, Any]
    graded: bool = True
    """Whether scores are shares of right answers: held-out losses with a minus, where nobody knows."""
    as_text: float | None = None
    """The held-out loss of the model as it is, if it reads the same words as ordinary prompts: what caches cost is the
    distance to it. None: the words are another workflow's, and no prompt of this one leads to them."""

    @property
    def regained(self) -> float | None:
        """The share of what caches had cost in held-out loss that was given back; None: too little to be shared."""
        first, best = self.outcome.untrained.loss, self.outcome.best.loss
        if self.as_text is None or first is None or best is None:
            return None
        cost = first - self.as_text
        return (first - best) / cost if cost > _LEAST_COST and best < first else None


def teach(
    model: LoadedModel,
    lesson: DistillConfig,
    settings: TuneSettings,
    amounts: Amounts,
    *,
    run: Path,
    out: Path,
    watcher: Watcher,
    command: str,
) -> DistillResult:
    """Distil a workflow: resumes what an earlier call has begun in the same folder.

    Args:
        model: Teacher and student.
        lesson: What is distilled.
        settings: How.
        amounts: How much.
        run: Where traces and checkpoints are kept.
        out: Where the best adapter goes, with its card.
        watcher: Hears of the progress.
        command: That would do it again, for the card.

    Raises:
        TrainingError: The loss is no number any more, or the folder is another run's.
        InvalidRequestError: Another run is using the folder, there is no such variant, or none of the items of a
            split can be taught.
    """
    tuned = Tuned(model, settings)
    with reserved(run):
        train = _traces(model, lesson, "train", amounts.traces, amounts, run, watcher)
        dev = _traces(model, lesson, "dev", amounts.held_out, amounts, run, watcher)
        items = lesson.items("dev", amounts.held_out, amounts.seed)
        graded = lesson.setup.case.higher_is_better and all(item.graded for item in items)
        forward = tuned.forward()
        words = [text_twin(trace) for trace in dev] if lesson.source is None else None
        as_text = None if words is None else forward.mean_loss(words, settings.batch_tokens)

        def judge(epoch: int) -> EvalScore:
            loss = forward.mean_loss([adapted(trace) for trace in dev], settings.batch_tokens)
            tuned.save(run / JUDGED)
            score = score_played(model, lesson, items, run / JUDGED, seed=amounts.seed) if graded else -loss
            held = EvalScore(score, loss)
            watcher.judged(epoch, held)
            return held

        def describe(outcome: TrainingProgress) -> Mapping[str, Any]:
            return {
                "workflow": lesson.setup.case.name,
                "variant": lesson.variant,
                "options": lesson.setup.changed(lesson.served).options.model_dump(mode="json"),
                "traces": asdict(amounts) | {"traces": len(train), "held_out": len(dev)},
                **({"source": lesson.source.as_settings(model)} if lesson.source is not None else {}),
                "untuned": asdict(outcome.untrained),
                "best": asdict(outcome.best),
                "as_text": as_text,
            }

        examples = FixedExamples(train, taught=settings.imitation > 0)
        judged_by = f"{digest_of(dev)} {len(items)}"
        tuning = Tuning(tuned, examples, judge, run / "checkpoint.pt", judged_by)
        card = run_and_keep(tuning, out, watcher.training, describe, command=command)
    return DistillResult(out, tuning.outcome, card, graded, as_text)


def _traces(
    model: LoadedModel, lesson: DistillConfig, split: Split, count: int, amounts: Amounts, run: Path, watcher: Watcher
) -> list[Trace]:
    items = lesson.items(split, count, amounts.seed)
    settings = lesson.setup.as_settings(model) | {
        "variant": lesson.variant,
        "split": split,
        "temperature": amounts.temperature,
        "seed": amounts.seed,
        **({"items": lesson.digest} if lesson.own is not None else {}),
        **({"source": lesson.source.as_settings(model)} if lesson.source is not None else {}),
    }
    path = run / f"{split}-traces.jsonl"
    with Journal(path, settings) as journal:
        left_out = sample_traces(
            model,
            lesson,
            items,
            journal,
            temperature=amounts.temperature,
            seed=amounts.seed,
            on_progress=lambda done: watcher.sampling(split, done, len(items)),
        )
    for item, reason in left_out.items():
        watcher.left_out(split, item, reason)
    if len(left_out) == len(items):
        first, reason = next(iter(left_out.items()))
        raise InvalidRequestError(f"none of the {len(items)} {split} items can be used: {first!r}, say: {reason}")
    # The journal may hold more: of a run that asked for more of the same.
    known = {trace.id: trace for trace in read_traces(path)}
    return [known[item.id] for item in items if item.id not in left_out]
