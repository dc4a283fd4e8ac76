"""Trains a synthesizer: an adapter for what it says itself, and a cache mapper for the branches that it reads.

Workers stay as they are, so that whoever else reads their caches finds what it knows (Parallel-Synthesis, section on
training; all three of its data sources).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from choreo_agents.engine import Engine
from choreo_agents.lab.evaluation.synthesis import evaluate_synthesis, solved_by_task
from choreo_agents.lab.language.synthesis import SYNTHESIS_TASKS
from choreo_agents.lab.synthesizers.examples import (
    LEARNT_TASKS,
    OFTENER,
    QUESTIONS,
    WEIGHTS,
    Views,
    dialogue,
    distilled,
    tasks,
)
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.training.checkpoints import Checkpoints, reserved
from choreo_agents.training.ending import run_and_keep
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.own_merges import OwnExamples, OwnMerges
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.training.tuning import Example, Held, Outcome, Passage, Source, Tuning

JUDGED = "judged"
TRIED, TAUGHT_HARDNESS = 4, 0.4
"""Problems for each distilled answer, at most, and how hard they are: up to four branches or so."""


@dataclass(frozen=True)
class Curriculum:
    """What a synthesizer is trained on, and judged by."""

    layouts: tuple[SynthesisLayout, ...] = ("parallel", "sequential")
    """How branches stand, in equal shares."""
    weights: Mapping[str, float] | None = None
    """Shares of the three sources; None: the usual ones."""
    examples: int = 512
    """Of each epoch, all new."""
    judged: int = 16
    """Development problems of each task and layout, for the score."""
    hardness: float = 1.0
    """Of the problems, 0 to 1: at 1 up to 8 branches, ..."""
    ramp: int = 8
    """... which is reached after so many epochs."""
    seed: int = 0

    def as_object(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self) | {"weights": dict(self.weights or WEIGHTS)}


class DrawnExamples:
    """Fresh examples for every epoch, decided by seed and number.

    Args:
        model: Its tokenizer and chat turns; and the teacher whose answers are distilled.
        curriculum: What is drawn.
        tuned: For which: mapped branches, adapted answers.
        taught: Whether the teacher's own prompts stand beside.
    """

    def __init__(self, model: LoadedModel, curriculum: Curriculum, tuned: Tuned, *, taught: bool) -> None:
        self._model = model
        self._curriculum = curriculum
        self._views = Views(
            layouts=curriculum.layouts,
            mapped=tuned.mapper is not None,
            adapter=TUNED if tuned.lora is not None else None,
            boundaries=tuned.settings.boundaries,
            text=taught,
        )
        self.digest = drawn_digest(curriculum, tuned.settings)

    def epoch(self, number: int) -> Sequence[Example]:
        """The examples of an epoch."""
        weights = self._curriculum.weights or WEIGHTS
        whole = sum(weights.values())
        found: list[Example] = []
        for name, weight in weights.items():
            wanted = round(self._curriculum.examples * weight / whole)
            if wanted:
                found += self._take(name, number, wanted)
        random.Random(f"curriculum {self._curriculum.seed} {number}").shuffle(found)
        return found

    def _take(self, source: str, epoch: int, wanted: int) -> list[Example]:
        curriculum = self._curriculum
        options: dict[str, Any] = {"seed": curriculum.seed, "views": self._views}
        first, hardness = epoch * wanted, curriculum.hardness * min(1.0, (epoch + 1) / curriculum.ramp)
        if source == "distilled":
            # With many branches the teacher is seldom right; of its answers so many are left out.
            options |= {"first": TRIED * first, "hardness": hardness * TAUGHT_HARDNESS}
            with Engine.load(self._model, method="baseline") as teacher:
                return list(islice(distilled(teacher, **options, batch=wanted, most=TRIED * wanted), wanted))
        options |= {"first": first, "hardness": hardness}
        if source == "dialogue":
            return list(islice(dialogue(self._model, **options), wanted))
        # What is right is known: nobody needs to say how likely the teacher finds it.
        return [replace(example, teacher=None) for example in islice(tasks(self._model, **options), wanted)]


def drawn_digest(curriculum: Curriculum, settings: TuneSettings) -> str:
    """Tells the examples that are drawn for a training from others'."""
    mapped, adapter = settings.mapper_rank != 0, TUNED if settings.rank else None
    drawn = [dict(OFTENER), QUESTIONS, settings.boundaries]
    said = json.dumps([curriculum.as_object(), mapped, adapter, drawn], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    out: Path
    outcome: Outcome
    untrained: Held
    best: Held


def train_synthesizer(
    model: LoadedModel,
    settings: TuneSettings,
    curriculum: Curriculum,
    *,
    run: Path,
    out: Path,
    on_progress: Callable[[Passage], None] = lambda passage: None,
    on_score: Callable[[int, Mapping[str, float]], None] = lambda epoch, shares: None,
    command: str = "",
    own: OwnMerges | None = None,
) -> Trained:
    """Train an adapter and a mapper; resumes what an earlier call has begun in the same folder.

    Args:
        model: That both are for.
        settings: How; a rank of 0 leaves the adapter or the mapper out.
        curriculum: On what.
        run: Where checkpoints are kept.
        out: Where the best go, with a card.
        on_progress: Hears of every batch.
        on_score: Hears the development scores by task, after each epoch.
        command: That would do it again, for the card.
        own: Merges to learn from and to be judged by, by their losses; None: drawn from the embedded language.

    Raises:
        TrainingError: The loss is no number any more, or the folder is another run's.
        InvalidRequestError: Another run is at work in the folder.
    """
    tuned = Tuned(model, settings)
    taught = settings.imitation > 0
    examples: Source = DrawnExamples(model, curriculum, tuned, taught=taught)
    if own is not None:
        examples = OwnExamples(own, curriculum.layouts, tuned, taught=taught, seed=curriculum.seed)
    forward = TraceForward(model, adapters={} if tuned.lora is None else {TUNED: tuned.lora}, mapper=tuned.mapper)

    def judge(epoch: int) -> Held:
        if own is not None:
            loss = forward.mean_loss(own.held_out_traces(curriculum.layouts, tuned), settings.batch_tokens)
            on_score(epoch, {"held-out loss": loss})
            return Held(-loss, loss)
        tuned.save(run / JUDGED)
        shares = held_out(model, run / JUDGED, curriculum)
        on_score(epoch, shares)
        return Held(mean(shares.values()))

    def describe(outcome: Outcome) -> Mapping[str, Any]:
        assert outcome.best is not None
        return {
            "curriculum": curriculum.as_object() if own is None else own.as_object(curriculum.layouts),
            "untrained": outcome.history[0]["held_out_score"],
            "best": outcome.best.score,
        }

    with reserved(run):
        judged_by = str(curriculum.judged) if own is None else own.held_out_digest
        tuning = Tuning(tuned, examples, judge, Checkpoints(run / "checkpoints"), judged_by)
        run_and_keep(tuning, out, on_progress, describe, command=command)
    outcome = tuning.outcome
    assert outcome.best is not None
    return Trained(out, outcome, Held(outcome.history[0]["held_out_score"]), outcome.best)


def held_out(model: LoadedModel, folder: Path, curriculum: Curriculum) -> dict[str, float]:
    """The share of development problems that a synthesizer solves, by layout and task.

    Those of the task that is held out of training are not among them.
    """
    chosen = [SYNTHESIS_TASKS[name] for name in LEARNT_TASKS]
    shares: dict[str, float] = {}
    with Engine.load(model) as engine:
        name = engine.load_adapter(folder, TUNED)
        for layout in curriculum.layouts:
            records = evaluate_synthesis(
                engine, chosen, count=curriculum.judged, split="dev", layout=layout, adapter=name
            )
            shares |= {f"{layout} {task}": score.share for task, score in solved_by_task(records).items()}
    return shares
