"""Who answers about branches: from words, from caches as they are, and with what was trained for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from choreo_agents.evaluation.placing import SynthesisLayout
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.synthesizer import Curriculum

Kind = Literal["text", "untrained", "calibrated", "full", "no mapper", "no adapter", "native"]


@dataclass(frozen=True)
class Contender:
    """One column of a table."""

    kind: Kind
    layout: SynthesisLayout = "sequential"

    @property
    def name(self) -> str:
        return self.kind if self.kind in ("text", "native") else f"{self.kind}, {self.layout}"


CONTENDERS: tuple[Contender, ...] = (
    Contender("text"),
    Contender("untrained", "parallel"),
    Contender("untrained", "sequential"),
    Contender("calibrated", "parallel"),
    Contender("calibrated", "sequential"),
    Contender("full", "parallel"),
    Contender("full", "sequential"),
    Contender("no mapper", "parallel"),
    Contender("no mapper", "sequential"),
    Contender("no adapter", "parallel"),
    Contender("no adapter", "sequential"),
    Contender("native", "native"),
)
FULL = TuneSettings(
    rank=32, mapper_rank=None, learning_rate=3e-3, mapper_learning_rate=4e-3, epochs=16, batch_tokens=2048, patience=8,
    imitation=0.5,
)  # fmt: skip
"""As `choreo train synthesizer` has them."""


@dataclass(frozen=True)
class Course:
    """What is trained for a contender."""

    settings: TuneSettings
    curriculum: Curriculum


def courses(seed: int = 0) -> Mapping[Kind, Course]:
    """The trainings, by the kind of contender that they are for."""
    full = FULL.model_copy(update={"seed": seed})
    both = Curriculum(layouts=("parallel", "sequential"), examples=2048, judged=8, seed=seed)
    return {
        "full": Course(full, both),
        "no mapper": Course(full.model_copy(update={"mapper_rank": 0}), both),
        "no adapter": Course(full.model_copy(update={"rank": 0}), both),
        "native": Course(full, replace(both, layouts=("native",))),
    }
