"""Groups that are added to `choreo`; what is in one is imported when it is listed, or a command of it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from choreo_agents.terminal.commands import group


def _benchmarks() -> dict[str, Callable[..., Any]]:
    from choreo_bench.commands import bench

    functions = (bench.engine, bench.step, bench.workflows, bench.synthesis, bench.edges, bench.pml)
    return {command.__name__: command for command in functions}


def _evaluations() -> dict[str, Callable[..., Any]]:
    from choreo_bench.commands import eval as scored

    functions = (scored.dilemma, scored.untuned, scored.tuned, scored.synthesis, scored.pml)
    return {"language": scored.language, **scored.workflows(), **{command.__name__: command for command in functions}}


def _trainings() -> dict[str, typer.Typer | Callable[..., Any]]:
    from choreo_bench.commands import train

    taught = "Train a model to read the caches of a workflow: an adapter, from ordinary runs of the workflow."
    return {"embedded": train.embedded, "synthesizer": train.synthesizer, "distill": group(taught, train.workflows)}


BENCH = group("Measure, with counts and intervals.", _benchmarks)
EVAL = group("Score answers, with intervals.", _evaluations)
TRAIN = group("Train, resumably.", _trainings)
