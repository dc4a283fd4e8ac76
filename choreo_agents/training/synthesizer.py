"""Trains a synthesizer: an adapter for what it says itself, and a cache mapper for the branches that it reads.

Workers stay as they are, so that whoever else reads their caches finds what it knows (Parallel-Synthesis, section on
training).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from choreo_agents.models import LoadedModel
from choreo_agents.training.checkpoints import Checkpoints, reserved
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.tuned import Tuned
from choreo_agents.training.tuning import EvalScore, Outcome, Source, TrainingProgress, Tuning, run_and_keep

Judged = tuple[EvalScore, Mapping[str, float]]
"""How good the weights are, and what that is made of, by name."""


class Curriculum(Protocol):
    """What a synthesizer is trained on, and judged by: merges of one's own, or drawn from a language."""

    @property
    def judged_by(self) -> str:
        """Tells what judges from what judges others."""
        ...

    def source(self, tuned: Tuned) -> Source:
        """The examples, shown as suits what learns: with mapped branches, adapted answers, a teacher beside them."""
        ...

    def judge(self, tuned: Tuned, run: Path) -> Callable[[], Judged]:
        """What scores the weights as they are when it is called.

        Args:
            tuned: What learns.
            run: A folder in which they may lie while they are judged.
        """
        ...

    def as_object(self) -> dict[str, Any]:
        """What a card says of it, as plain JSON."""
        ...


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    out: Path
    outcome: Outcome
    untrained: EvalScore
    best: EvalScore


def train_synthesizer(
    model: LoadedModel,
    settings: TuneSettings,
    curriculum: Curriculum,
    *,
    run: Path,
    out: Path,
    on_progress: Callable[[TrainingProgress], None] = lambda passage: None,
    on_score: Callable[[int, Mapping[str, float]], None] = lambda epoch, shares: None,
    command: str = "",
) -> Trained:
    """Train an adapter and a mapper; resumes what an earlier call has begun in the same folder.

    Args:
        model: That both are for.
        settings: How; a rank of 0 leaves the adapter or the mapper out.
        curriculum: On what, and by what it is judged.
        run: Where checkpoints are kept.
        out: Where the best go, with a card.
        on_progress: Hears of every batch.
        on_score: Hears what the score is made of, after each epoch.
        command: That would do it again, for the card.

    Raises:
        TrainingError: The loss is no number any more, or the folder is another run's.
        InvalidRequestError: Another run is at work in the folder.
    """
    tuned = Tuned(model, settings)
    scored = curriculum.judge(tuned, run)

    def judge(epoch: int) -> EvalScore:
        held, shares = scored()
        on_score(epoch, shares)
        return held

    def describe(outcome: Outcome) -> Mapping[str, Any]:
        assert outcome.best is not None
        return {
            "curriculum": curriculum.as_object(),
            "untrained": outcome.history[0]["held_out_score"],
            "best": outcome.best.score,
        }

    with reserved(run):
        checkpoints = Checkpoints(run / "checkpoints")
        tuning = Tuning(tuned, curriculum.source(tuned), judge, checkpoints, curriculum.judged_by)
        run_and_keep(tuning, out, on_progress, describe, command=command)
    outcome = tuning.outcome
    assert outcome.best is not None
    return Trained(out, outcome, EvalScore(outcome.history[0]["held_out_score"]), outcome.best)
