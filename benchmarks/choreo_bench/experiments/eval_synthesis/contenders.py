"""Who answers about branches: from words, from caches as they are, and with what was trained for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from choreo_agents.synthesis.placing import SynthesisLayout
from choreo_agents.training.settings import TuneSettings
from choreo_bench.synthesizers.curriculum import DrawnCurriculum

Kind = Literal["text", "untrained", "calibrated", "full", "no mapper", "no adapter", "native"]


@dataclass(frozen=True)
class Contender:
    """One column of a table."""

    kind: Kind
    layout: SynthesisLayout = "sequential"

    @property
    def training(self) -> str:
        """What it answers with was trained as, its folder's name too; empty if nothing was."""
        if self.kind in ("text", "untrained", "calibrated"):
            return ""
        return self.kind if self.kind == "native" else f"{self.kind.replace(' ', '-')}-{self.layout}"

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
    rank=32, mapper_rank=None, boundaries=True, dropout=0.0, learning_rate=3e-3, mapper_learning_rate=4e-3,
    final_rate=0.0, epochs=20, batch_tokens=4096, patience=20, keep="last", imitation=0.5,
)  # fmt: skip
"""As `choreo train synthesizer` has them, but longer, and never stopped early: at the end, where the rates come to
nothing, the weights are better than a score of few problems can tell."""


@dataclass(frozen=True)
class ContenderTraining:
    """What is trained for a contender."""

    settings: TuneSettings
    curriculum: DrawnCurriculum


_LEFT_OUT: Mapping[Kind, Mapping[str, int]] = {
    "full": {},
    "no mapper": {"mapper_rank": 0},
    "no adapter": {"rank": 0},
    "native": {},
}


def courses(seed: int = 0) -> Mapping[str, ContenderTraining]:
    """The trainings, by name: one for each layout, all equally long."""
    full = FULL.model_copy(update={"seed": seed})
    return {
        one.training: ContenderTraining(
            full.model_copy(update=_LEFT_OUT[one.kind]),
            DrawnCurriculum(layouts=(one.layout,), examples=2048, judged=12, seed=seed),
        )
        for one in CONTENDERS
        if one.training
    }
