"""Synthesis problems: branches that workers say side by side, and an answer made from what all of them say."""

from __future__ import annotations

from choreo_bench.language.synthesis.parts import Parts, SpokenBranch
from choreo_bench.language.synthesis.tasks import FROM_TRUNK, HELD_OUT, SYNTHESIS_TASKS, Synthesis, SynthesisTask

__all__ = ["FROM_TRUNK", "HELD_OUT", "SYNTHESIS_TASKS", "Parts", "SpokenBranch", "Synthesis", "SynthesisTask"]
