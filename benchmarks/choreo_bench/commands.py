"""The laboratory's commands, as entry points add them to `choreo`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from choreo_agents.terminal.commands import group


def _evaluations() -> dict[str, Callable[..., Any]]:
    from choreo_bench.cases import CASES
    from choreo_bench.experiments.eval_dilemma.command import eval_dilemma
    from choreo_bench.experiments.eval_language.command import language
    from choreo_bench.experiments.eval_pml.command import pml
    from choreo_bench.experiments.eval_synthesis.command import synthesis
    from choreo_bench.experiments.eval_tuned.command import tuned
    from choreo_bench.experiments.eval_untuned.command import untuned
    from choreo_bench.experiments.eval_workflow.command import eval_workflow

    return {
        "language": language,
        **{name.replace("_", "-"): eval_workflow(name) for name in CASES},
        "dilemma": eval_dilemma,
        "untuned": untuned,
        "tuned": tuned,
        "synthesis": synthesis,
        "pml": pml,
    }


def _benchmarks() -> dict[str, Callable[..., Any]]:
    from choreo_bench.experiments.bench_edges.command import edges
    from choreo_bench.experiments.bench_engine.command import engine
    from choreo_bench.experiments.bench_pml.command import pml
    from choreo_bench.experiments.bench_step.command import step
    from choreo_bench.experiments.bench_synthesis.command import synthesis
    from choreo_bench.experiments.bench_workflows.command import workflows

    return {"engine": engine, "step": step, "workflows": workflows, "synthesis": synthesis, "edges": edges, "pml": pml}


def _trainings() -> dict[str, typer.Typer | Callable[..., Any]]:
    from choreo_bench.experiments.train_embedded.command import embedded
    from choreo_bench.experiments.train_synthesizer.command import synthesizer

    distill = group(
        "Teach a model to read the caches of a workflow: an adapter, from the workflow's own ordinary runs.", _distilled
    )
    return {"embedded": embedded, "synthesizer": synthesizer, "distill": distill}


def _distilled() -> dict[str, Callable[..., Any]]:
    from choreo_bench.cases import CASES
    from choreo_bench.experiments.train_distill.command import distill_workflow

    return {name.replace("_", "-"): distill_workflow(name) for name in CASES}


EVAL = group("Score answers, with intervals.", _evaluations)
BENCH = group("Measure, with counts and intervals.", _benchmarks)
TRAIN = group("Train, resumably.", _trainings)
