"""What it costs a decode step that its rows draw their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.loader import LoadedModel
from choreo_bench.experiments.bench_step.measure import decode_steps, described
from choreo_bench.experiments.bench_step.report import StepShape, markdown

Shape = Literal["peaked", "flat"]
DRAWN = {"temperature": 0.7, "top_p": 0.95}
_EXPONENT, _ALIKE = 1.28, 0.05
"""Peaked logits: the n-th likeliest word is n to the minus 1.28 times as likely as the first; and noise of 0.05."""
BARS: dict[Shape, float] = {"peaked": 1.1, "flat": 1.3}
"""A step's time over a greedy one's, at most, at 32 rows."""
BAR_ROWS = 32
COLUMNS = ("rows", "messages", "logits", "greedy, ms", "T 0.7, p 0.95, ms", "of that sampling", "over greedy")


def drawn_logits(shape: Shape, rows: int, words: int) -> Tensor:
    """Draw fp32 logits, [rows, words]: as a model's are, in any order of words, or of a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, words, generator=generator)
    if shape == "flat":
        return noise
    falling = -_EXPONENT * torch.arange(1, words + 1, dtype=torch.float64).log().float()
    for row in noise:
        row.mul_(_ALIKE).add_(falling[torch.randperm(words, generator=generator)])
    return noise


@dataclass(frozen=True)
class SampledTimes:
    """Medians over steps, in seconds."""

    shape: StepShape
    logits: Shape
    greedy: float
    drawn: float
    sampling: float
    """Of what was drawn: choosing alone."""

    @property
    def ratio(self) -> float:
        return self.drawn / self.greedy


@dataclass(frozen=True)
class SampledReport:
    """Of one run."""

    model: str
    dtype: str
    threads: int
    made_by: str
    """Versions, and the processor's kind."""
    times: tuple[SampledTimes, ...]

    def title(self) -> str:
        return f"{self.model}, {self.dtype}, {self.threads} threads: ms of a decode step, medians"

    def as_markdown(self, command: str) -> str:
        """The table with the command that makes it."""
        return markdown(self, COLUMNS, command)

    def rows(self) -> list[tuple[str, ...]]:
        """A line for each shape and kind of logits."""
        return [
            (
                str(each.shape.rows),
                f"{each.shape.messages} x {each.shape.tokens}",
                each.logits,
                f"{1e3 * each.greedy:.1f}",
                f"{1e3 * each.drawn:.1f}",
                f"{1e3 * each.sampling:.1f}",
                f"{each.ratio:.2f}x",
            )
            for each in self.times
        ]

    def lines(self) -> list[str]:
        """The bars, where they were measured."""
        return [
            f"{'met' if each.ratio <= BARS[each.logits] else 'missed'}: {BAR_ROWS} rows, {each.logits} logits, "
            f"at most {BARS[each.logits]}x of a greedy step: {each.ratio:.2f}x"
            for each in self.times
            if each.shape.rows == BAR_ROWS
        ]

    def as_object(self) -> dict[str, Any]:
        return asdict(self) | {"lines": self.lines()}


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
) -> SampledReport:
    """Decode greedily and at a temperature, in turns, over logits that fall as a model's do and over flat ones.

    Args:
        model: Served.
        shapes: Rows, messages and tokens of each message.
        steps: Decode steps of each row that are counted.
        repeats: Rounds of all.
        on_progress: Told what comes next.
    """
    kinds: tuple[Shape, ...] = ("peaked", "flat")
    most = max(shape.rows for shape in shapes)
    logits = {kind: drawn_logits(kind, most, model.adapter.vocabulary_size) for kind in kinds}
    found: dict[tuple[StepShape, Shape, bool], list[dict[str, float]]] = defaultdict(list)
    for number in range(repeats):
        for shape in shapes:
            for kind in kinds:
                for drawn in (False, True):
                    what = "T 0.7, p 0.95" if drawn else "greedy"
                    on_progress(f"{shape.rows} rows over {shape.messages} x {shape.tokens}, {kind}: {what}")
                    with _as_if(logits[kind]), torch.inference_mode():
                        sampling = DRAWN if drawn else {}
                        found[shape, kind, drawn] += decode_steps(model, shape, "auto", steps, number, **sampling)
    times = [
        SampledTimes(
            shape,
            kind,
            median(sum(step.values()) for step in found[shape, kind, False]),
            median(sum(step.values()) for step in found[shape, kind, True]),
            median(step.get("sample", 0.0) for step in found[shape, kind, True]),
        )
        for shape in shapes
        for kind in kinds
    ]
    return SampledReport(*described(model), tuple(times))
