"""Curriculum of a synthesizer: examples to learn from and to be judged by, drawn from the embedded language."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.placing import SYNTHESIS_LAYOUTS, SynthesisLayout
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesis_traces import QUESTIONS, Views
from choreo_agents.training.synthesizer import Judged
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.training.tuning import EvalScore, Example
from choreo_bench.evaluation.synthesis import evaluate_synthesis, solved_by_task
from choreo_bench.language.synthesis import SYNTHESIS_TASKS
from choreo_bench.synthesizers.examples import (
    LEARNT_TASKS,
    OFTENER,
    WEIGHTS,
    dialogue,
    distilled,
    tasks,
)

JUDGED = "judged"
TRIED, TAUGHT_HARDNESS = 4, 0.4
"""Problems for each distilled answer, at most, and how hard they are: up to four branches or so."""


@dataclass(frozen=True)
class DrawnCurriculum:
    """All three data sources of Parallel-Synthesis, and development problems of the tasks that are learnt."""

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

    @property
    def judged_by(self) -> str:
        return str(self.judged)

    def source(self, tuned: Tuned) -> DrawnExamples:
        return DrawnExamples(self, tuned)

    def judge(self, tuned: Tuned, run: Path) -> Callable[[], Judged]:
        def score() -> Judged:
            tuned.save(run / JUDGED)
            shares = held_out(tuned.model, run / JUDGED, self)
            return EvalScore(mean(shares.values())), shares

        return score

    def as_object(self) -> dict[str, Any]:
        return asdict(self) | {"weights": dict(self.weights or WEIGHTS)}


class DrawnExamples:
    """Fresh examples for every epoch, decided by seed and number.

    Args:
        curriculum: What is drawn.
        tuned: For which: mapped branches, adapted answers, and if it imitates, the prompts of its own model beside
            them; that model's answers are distilled, too.
    """

    def __init__(self, curriculum: DrawnCurriculum, tuned: Tuned) -> None:
        self._model = tuned.model
        self._curriculum = curriculum
        self._views = Views(
            layouts=curriculum.layouts,
            mapped=tuned.mapper is not None,
            adapter=TUNED if tuned.lora is not None else None,
            boundaries=tuned.settings.boundaries,
            text=tuned.settings.imitation > 0,
        )
        self.digest = drawn_digest(curriculum, tuned.settings)

    def epoch(self, number: int) -> Sequence[Example]:
        """The examples of an epoch."""
        weights = self._curriculum.weights or WEIGHTS
        whole = sum(weights.values())
        examples: list[Example] = []
        for name, weight in weights.items():
            wanted = round(self._curriculum.examples * weight / whole)
            if wanted:
                examples += self._take(name, number, wanted)
        random.Random(f"curriculum {self._curriculum.seed} {number}").shuffle(examples)
        return examples

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


def drawn_digest(curriculum: DrawnCurriculum, settings: TuneSettings) -> str:
    """Tells the examples that are drawn for a training from others'."""
    mapped, adapter = settings.mapper_rank != 0, TUNED if settings.rank else None
    drawn = [dict(OFTENER), QUESTIONS, settings.boundaries]
    text = json.dumps([curriculum.as_object(), mapped, adapter, drawn], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def held_out(model: LoadedModel, folder: Path, curriculum: DrawnCurriculum) -> dict[str, float]:
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


def layouts_named(names: str) -> tuple[SynthesisLayout, ...]:
    """Find layouts by name, with commas between, each once; raises `InvalidRequestError`."""
    given = list(dict.fromkeys(name.strip() for name in names.split(",")))
    chosen = tuple(layout for name in given for layout in SYNTHESIS_LAYOUTS if layout == name)
    unknown = [name for name in given if name not in SYNTHESIS_LAYOUTS]
    if unknown or not chosen:
        raise InvalidRequestError(f"unknown layout {unknown[0]!r}: use some of {', '.join(SYNTHESIS_LAYOUTS)}")
    return chosen


def shares_in(text: str) -> dict[str, float]:
    """Read `dialogue=1,tasks=2` as numbers; raises `InvalidRequestError`."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            shares[name] = float(share)
        except ValueError:
            shares[name] = -1.0
        if name not in WEIGHTS or not 0 <= shares[name] < math.inf:
            raise InvalidRequestError(f"--sources {part!r}: pass shares of {', '.join(WEIGHTS)}, such as tasks=0.5")
    if not sum(shares.values()):
        raise InvalidRequestError("--sources: at least one share must be above 0")
    return shares
