"""Trains a synthesizer: an adapter for its own messages, and a cache mapper for the branches that it reads.

Workers stay unchanged, so their KV remains valid for all other readers (Parallel-Synthesis, section on training).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from choreo_agents.models import LoadedModel
from choreo_agents.training.checkpoints import reserved
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.tuned import Tuned
from choreo_agents.training.tuning import EvalScore, Source, TrainingProgress, Tuning, run_and_keep

Judged = tuple[EvalScore, Mapping[str, float]]
"""Score of the weights, and its components by name."""


class Curriculum(Protocol):
    """Training examples and evaluation of a synthesizer: the user's own merges, or merges drawn from a language."""

    @property
    def judged_by(self) -> str:
        """Digest of the evaluation's data and settings: a run does not resume with another one."""
        ...

    def source(self, tuned: Tuned) -> Source:
        """Return the examples in the form that the trained parts need: mapped branches, adapted answers, a teacher."""
        ...

    def judge(self, tuned: Tuned, run: Path) -> Callable[[], Judged]:
        """Return a function that scores the weights as they are when it is called.

        Args:
            tuned: The weights.
            run: Directory in which they may be saved for the evaluation.
        """
        ...

    def as_object(self) -> dict[str, Any]:
        """Return the curriculum's entry in a card, as plain JSON."""
        ...


def train_synthesizer(
    model: LoadedModel,
    settings: TuneSettings,
    curriculum: Curriculum,
    *,
    run: Path,
    out: Path,
    on_progress: Callable[[TrainingProgress], None] = lambda progress: None,
    on_score: Callable[[int, Mapping[str, float]], None] = lambda epoch, shares: None,
    command: str = "",
) -> TrainingProgress:
    """Train an adapter and a mapper; an interrupted run in the same directory is resumed.

    Args:
        model: The model that both belong to.
        settings: Hyperparameters; a rank of 0 leaves the adapter or the mapper out.
        curriculum: Examples and evaluation.
        run: Directory of the checkpoint.
        out: Directory for the best weights and a card.
        on_progress: Called after every batch.
        on_score: Called with the components of the score after each epoch.
        command: Command line that repeats the run, for the card.

    Raises:
        TrainingError: The loss is not finite any more, or the directory belongs to another run.
        InvalidRequestError: Another process is training in the directory.
    """
    tuned = Tuned(model, settings)
    scored = curriculum.judge(tuned, run)

    def judge(epoch: int) -> EvalScore:
        score, shares = scored()
        on_score(epoch, shares)
        return score

    def describe(outcome: TrainingProgress) -> Mapping[str, Any]:
        scores = {"untrained": outcome.untrained.score, "best": outcome.best.score}
        return {"curriculum": curriculum.as_object(), **scores}

    with reserved(run):
        tuning = Tuning(tuned, curriculum.source(tuned), judge, run / "checkpoint.pt", curriculum.judged_by)
        run_and_keep(tuning, out, on_progress, describe, command=command)
    return tuning.outcome
