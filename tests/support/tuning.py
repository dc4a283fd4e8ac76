"""Small training runs over drawn traces, to be killed, resumed and compared bit by bit."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from choreo_agents.models import LoadedModel
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.trace import Trace, digest_of, text_twin
from choreo_agents.training.tuned import TUNED, Tuned
from choreo_agents.training.tuning import EvalScore, Example, TrainingProgress, Tuning
from support.traces import draw_trace, with_adapters, with_mapped

SMALL: dict[str, Any] = {
    "rank": 4, "mapper_rank": 4, "learning_rate": 1e-2, "mapper_learning_rate": 2e-2, "epochs": 3,
    "batch_tokens": 60, "imitation": 0.5, "patience": 3, "dropout": 0.2,
}  # fmt: skip


class KilledError(Exception):
    """Stands for a process that is gone."""


def draw_examples(count: int = 5, *, seed: int = 1, mapped: bool = True, adapted: bool = True) -> list[Example]:
    """Traces with mapped and adapted messages; every other one has a teacher."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        trace = draw_trace(rng, 4, longest=12, name=f"trace {number}")
        teacher = text_twin(trace) if number % 2 == 0 else None
        trace = with_mapped(trace, rng) if mapped else trace
        found.append(Example(with_adapters(trace, [TUNED] if adapted else [None], rng), teacher))
    return found


class FixedSource:
    """The same examples in every epoch."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = list(examples)
        self.digest = digest_of([example.trace for example in examples])

    def epoch(self, number: int) -> Sequence[Example]:
        return self.examples


class DrawnSource:
    """Others in every epoch."""

    digest = "drawn"

    def epoch(self, number: int) -> Sequence[Example]:
        return draw_examples(seed=number)


def held_out(tuned: Tuned, traces: Sequence[Trace]) -> Callable[[int], EvalScore]:
    """A judge: the log-loss of these without dropout."""
    adapters = {} if tuned.lora is None else {TUNED: tuned.lora}
    forward = TraceForward(tuned.model, adapters=adapters, mapper=tuned.mapper)

    def judge(epoch: int) -> EvalScore:
        dropout = 0.0
        if tuned.lora is not None:
            dropout, tuned.lora.dropout = tuned.lora.dropout, 0.0
        loss = float(forward.losses(traces).mean.detach())
        if tuned.lora is not None:
            tuned.lora.dropout = dropout
        return EvalScore(-loss, loss)

    return judge


class Killer:
    """Hears of a run's progress, and kills it after so many words."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.heard: list[TrainingProgress] = []

    def __call__(self, passage: TrainingProgress) -> None:
        self.heard.append(passage)
        if len(self.heard) == self.at:
            raise KilledError


def make_tuning(
    model: LoadedModel,
    folder: Path,
    *,
    source: Any = None,
    judge: Callable[[Tuned], Callable[[int], EvalScore]] | None = None,
    judged_by: str = "",
    **changes: Any,
) -> Tuning:
    """A small run; `changes` of its settings."""
    tuned = Tuned(model, TuneSettings(**(SMALL | changes)))
    mapped, adapted = tuned.mapper is not None, tuned.lora is not None
    examples = source or FixedSource(draw_examples(mapped=mapped, adapted=adapted))
    judged = [example.trace for example in draw_examples(2, seed=99, mapped=mapped, adapted=adapted)]
    own = judge or (lambda made: held_out(made, judged))
    return Tuning(tuned, examples, own(tuned), folder / "checkpoint.pt", judged_by)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writes fail in the middle, as those to a full disk do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
