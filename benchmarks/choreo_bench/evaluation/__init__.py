"""Plays problems of the language on an engine, in ordinary prompts or from caches, and scores what is said."""

from __future__ import annotations

from choreo_bench.evaluation.evaluate import Evaluation, TaskResult, evaluate
from choreo_bench.evaluation.play import LAYOUTS, Layout, play
from choreo_bench.evaluation.score import Difference, Score
from choreo_bench.evaluation.voting import VoteResult, sample_and_vote

__all__ = [
    "LAYOUTS",
    "Difference",
    "Evaluation",
    "Layout",
    "Score",
    "TaskResult",
    "VoteResult",
    "evaluate",
    "play",
    "sample_and_vote",
]
