"""Times the parts of decode steps, by wrapping the functions that do them; and what drawing tokens adds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from choreo_agents.attention.step import StepAttention
from choreo_agents.engine import Decode, Engine
from choreo_agents.engine.settings import Memory
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime import executor
from choreo_agents.runtime.executor import Executor
from choreo_agents.runtime.loop import EngineLoop, NextSteps
from choreo_agents.runtime.step import StepMaker
from choreo_agents.sampling import Sampling
from choreo_bench.experiments.bench_step.report import (
    PARTS,
    Logits,
    Machine,
    SampledTimes,
    StepShape,
    StepTimes,
    Way,
    sampled_report,
    step_report,
)
from choreo_bench.harness import Report
from choreo_bench.timing import made_by

WAYS: dict[Way, str] = {"choreo": "auto", "torch": "folded"}
"""What attends in each: with torch's operators, transformers' modelling code computes the rest."""
DRAWN = {"temperature": 0.7, "top_p": 0.95}
_EXPONENT, _ALIKE = 1.28, 0.05
"""Peaked logits: the n-th likeliest word is n to the minus 1.28 times as likely as the first; and noise of 0.05."""
_LEFT_OUT = 4
"""Steps at each end: prompts are encoded in the first, calls end in the last."""


class _Clock:
    """CPU time of the engine's thread and wall time, by part and step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._within = 0.0

    def around(self, part: str, function: Callable[..., Any], *, ends: bool = False) -> Callable[..., Any]:
        """The function, timed as a part of the step that it runs in; what it calls and is timed is not its own."""
        host = part != "forward"

        def timed(*args: Any, **options: Any) -> Any:
            began, outer, self._within = _seconds(host), self._within, 0.0
            try:
                return function(*args, **options)
            finally:
                whole = _seconds(host) - began
                self._now[part] += whole - self._within
                self._within = outer + whole
                if ends:
                    self.steps.append(dict(self._now))
                    self._now.clear()

        return timed


def _seconds(host: bool) -> float:
    """Work of Python's is counted in CPU time of its thread; products may be another thread's."""
    return time.thread_time() if host else time.perf_counter()


@contextmanager
def _timed(clock: _Clock) -> Iterator[None]:
    parts = (
        ("schedule", NextSteps, "decide"),
        ("plan", StepMaker, "make"),
        ("plan", Executor, "_attention"),
        ("account", StepAttention, "kv_bytes_read"),
        ("forward", ModelAdapter, "logits"),
        ("sample", executor, "choose_tokens"),
    )
    patches = [patch.object(owner, name, clock.around(part, getattr(owner, name))) for part, owner, name in parts]
    patches.append(patch.object(EngineLoop, "_account", clock.around("account", EngineLoop._account, ends=True)))
    for patched in patches:
        patched.start()
    try:
        yield
    finally:
        for patched in patches:
            patched.stop()


def shapes_named(text: str, tokens: int) -> list[StepShape]:
    """Read shapes that are written as ROWSxMESSAGES, with commas between; raises `InvalidRequestError`.

    Args:
        text: `8x1,64x16`, say.
        tokens: That all messages of a shape have together.
    """
    shapes = []
    for part in text.split(","):
        rows, times, messages = part.strip().partition("x")
        if not times or not rows.isdecimal() or not messages.isdecimal() or "0" in (rows, messages):
            raise InvalidRequestError(f"a shape must be ROWSxMESSAGES, such as 64x16, not {part!r}")
        if tokens < int(messages):
            raise InvalidRequestError(f"{tokens} tokens are too few for {messages} messages: set --tokens {messages}")
        shapes.append(StepShape(int(rows), int(messages), tokens // int(messages)))
    return shapes


def measure_steps(
    model: LoadedModel,
    shapes: Sequence[StepShape],
    *,
    steps: int,
    repeats: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Decode with several rows over several messages, and say where the time of a step went.

    Args:
        model: Served; both ways take turns.
        shapes: Rows, messages and tokens of each message.
        steps: Decode steps of each row that are counted.
        repeats: Rounds of all shapes.
        on_progress: Told what comes next.
    """
    seconds: dict[tuple[StepShape, Way], list[dict[str, float]]] = defaultdict(list)
    for number in range(repeats):
        for shape in shapes:
            for way, backend in WAYS.items():
                on_progress(f"{shape.rows} rows over {shape.messages} x {shape.tokens}: {way}")
                seconds[shape, way] += decode_steps(model, shape, backend, steps, seed=number)
    times = [
        StepTimes(shape, way, {part: median(step.get(part, 0.0) for step in every) for part in PARTS}, len(every))
        for (shape, way), every in seconds.items()
    ]
    computed = {way: model.computed_with(model.backend(backend)) for way, backend in WAYS.items()}  # type: ignore[arg-type]
    return step_report(_machine(model), computed, times)


def _machine(model: LoadedModel) -> Machine:
    dtype = str(model.adapter.geometry.dtype).removeprefix("torch.")
    return Machine(Path(model.name).name, dtype, torch.get_num_threads(), made_by())


def decode_steps(
    model: LoadedModel, shape: StepShape, backend: str, steps: int, seed: int, **sampled: float
) -> list[dict[str, float]]:
    """Seconds of the parts of so many decode steps, one after the other.

    Args:
        model: Served.
        shape: Rows, messages and tokens of each message.
        backend: Attends.
        steps: That are counted, less what is left out at each end.
        seed: Of the messages.
        sampled: How tokens are drawn.
    """
    tokens = shape.messages * shape.tokens + shape.rows * (steps + 3 * _LEFT_OUT + 16)
    budget = (tokens + 512) * model.adapter.geometry.bytes_per_token
    words = model.adapter.vocabulary_size
    with Engine.load(model, backend=backend, memory=Memory(kv_budget_bytes=budget)) as engine:  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(3, words, (shape.messages, shape.tokens), generator=generator).tolist()
        seen = [engine.prefill(message) for message in drawn]
        sampling = Sampling(max_tokens=steps + 2 * _LEFT_OUT, stop_tokens=(), **sampled)
        calls = [Decode([3 + row % (words - 3)], parents=seen, sampling=sampling) for row in range(shape.rows)]
        clock = _Clock()
        with _timed(clock):
            engine.decode(calls)
    return clock.steps[_LEFT_OUT:-_LEFT_OUT]


def drawn_logits(kind: Logits, rows: int, words: int) -> Tensor:
    """Draw fp32 logits, [rows, words]: as a model's are, in any order of words, or of a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, words, generator=generator)
    if kind == "flat":
        return noise
    falling = -_EXPONENT * torch.arange(1, words + 1, dtype=torch.float64).log().float()
    for row in noise:
        row.mul_(_ALIKE).add_(falling[torch.randperm(words, generator=generator)])
    return noise


@contextmanager
def _as_if(logits: Tensor) -> Iterator[None]:
    """Let passes compute what they do, and give these instead: random weights have no model's logits."""
    computed = ModelAdapter.logits

    def given(adapter: ModelAdapter, *args: Any, **options: Any) -> Tensor:
        return logits[: len(computed(adapter, *args, **options))]

    with patch.object(ModelAdapter, "logits", given):
        yield


def measure_sampled(
    model: LoadedModel,
    shapes: Sequence[StepShape],
    *,
    steps: int,
    repeats: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Decode greedily and at a temperature, in turns, over logits that fall as a model's do and over flat ones.

    Args:
        model: Served.
        shapes: Rows, messages and tokens of each message.
        steps: Decode steps of each row that are counted.
        repeats: Rounds of all.
        on_progress: Told what comes next.
    """
    kinds: tuple[Logits, ...] = ("peaked", "flat")
    most = max(shape.rows for shape in shapes)
    logits = {kind: drawn_logits(kind, most, model.adapter.vocabulary_size) for kind in kinds}
    seconds: dict[tuple[StepShape, Logits, bool], list[dict[str, float]]] = defaultdict(list)
    for number in range(repeats):
        for shape in shapes:
            for kind in kinds:
                for drawn in (False, True):
                    what = "T 0.7, p 0.95" if drawn else "greedy"
                    on_progress(f"{shape.rows} rows over {shape.messages} x {shape.tokens}, {kind}: {what}")
                    with _as_if(logits[kind]), torch.inference_mode():
                        sampling = DRAWN if drawn else {}
                        seconds[shape, kind, drawn] += decode_steps(model, shape, "auto", steps, number, **sampling)
    times = [
        SampledTimes(
            shape,
            kind,
            median(sum(step.values()) for step in seconds[shape, kind, False]),
            median(sum(step.values()) for step in seconds[shape, kind, True]),
            median(step.get("sample", 0.0) for step in seconds[shape, kind, True]),
        )
        for shape in shapes
        for kind in kinds
    ]
    return sampled_report(_machine(model), times)
