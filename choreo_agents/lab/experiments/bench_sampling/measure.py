"""Times the choice of all tokens of a step, each time beside one softmax over the same logits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from choreo_agents.lab.experiments.bench_sampling.report import CaseTimes, SamplingReport
from choreo_agents.lab.rivals.processors import Processors
from choreo_agents.sampling import BatchSampler, Sampling, TokenSampler, choose_tokens

Shape = Literal["peaked", "flat"]
_Made = TypeVar("_Made")
_EXPONENT = 1.28
"""Of the peaked ones: the n-th likeliest word is n to the minus so many times as likely as the first."""
_ALIKE = 0.05
_SEEN = 2_000
"""Tokens before the answer, where there is a penalty."""


@dataclass(frozen=True)
class SamplingCase:
    """What every row of a step asks for."""

    name: str
    shape: Shape
    sampling: Sampling
    bar: float | None = None
    """Softmaxes that it may cost at most, at 64 rows of 151,936 words and one thread."""
    rival: bool = True
    """Whether transformers can do the same."""


_QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
CASES = (
    SamplingCase("greedy", "peaked", Sampling(), bar=0.4),
    SamplingCase("greedy", "flat", Sampling(), bar=0.4),
    SamplingCase("k 20, p 0.95", "peaked", Sampling(**_QWEN), bar=1.0),
    SamplingCase("k 20, p 0.95", "flat", Sampling(**_QWEN), bar=1.0),
    SamplingCase("p 0.9", "peaked", Sampling(temperature=1.0, top_p=0.9), bar=2.0),
    SamplingCase("p 0.9", "flat", Sampling(temperature=1.0, top_p=0.9)),
    SamplingCase("min-p 0.05", "peaked", Sampling(temperature=1.0, min_p=0.05)),
    SamplingCase("min-p 0.05", "flat", Sampling(temperature=1.0, min_p=0.05)),
    SamplingCase("no filter", "peaked", Sampling(temperature=1.0)),
    SamplingCase("k 20, p 0.95, repetition", "peaked", Sampling(**_QWEN, repetition_penalty=1.1)),
    SamplingCase(
        "k 20, p 0.95, presence, frequency",
        "peaked",
        Sampling(**_QWEN, presence_penalty=0.5, frequency_penalty=0.2),
        rival=False,
    ),
    SamplingCase("k 20, p 0.95, 5 logprobs", "peaked", Sampling(**_QWEN, logprobs=5), rival=False),
)


def drawn_logits(shape: Shape, rows: int, words: int) -> Tensor:
    """fp32, [rows, words]: as a model's are, in any order of words, or of a normal distribution."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, words, generator=generator)
    if shape == "flat":
        return noise
    falling = -_EXPONENT * torch.arange(1, words + 1, dtype=torch.float64).log().float()
    for row in noise:
        row.mul_(_ALIKE).add_(falling[torch.randperm(words, generator=generator)])
    return noise


def nucleus(logits: Tensor, top_p: float) -> int:
    """Words that top-p keeps of a row, in the middle of all rows."""
    sizes = []
    for row in logits:
        chances = row.double().softmax(-1).sort(descending=True).values
        sizes.append(int((chances.cumsum(0) - chances < top_p).sum()))
    return sorted(sizes)[len(sizes) // 2]


class _Running:
    """One case: samplers that go on with what they choose."""

    def __init__(self, case: SamplingCase, logits: Tensor) -> None:
        self.case, self._logits = case, logits
        generator = torch.Generator().manual_seed(1)
        rows, words = logits.shape
        seen = torch.randint(words, (rows, _SEEN), generator=generator)
        self._before = seen if case.sampling.penalises else seen[:, :1]
        self._samplers = [TokenSampler(case.sampling, row, own.tolist()) for row, own in enumerate(self._before)]
        self._batch, self._processors = BatchSampler(), Processors(case.sampling) if case.rival else None

    def softmax(self) -> Tensor:
        """The unit."""
        return self._logits.softmax(dim=-1)

    def ours(self) -> Tensor:
        """All tokens of a step, [rows]."""
        chosen = choose_tokens(self._samplers, self._logits, self._batch)
        for sampler, each in zip(self._samplers, chosen, strict=True):
            sampler.take(each.token)
        return torch.tensor([each.token for each in chosen])

    def theirs(self) -> None:
        """The same by transformers."""
        if self._processors is not None:
            self._processors.choose(self._before, self._logits)

    def allowed(self, tokens: Tensor) -> int:
        """How many of our tokens transformers' filters leave; then they are counted as seen."""
        if self._processors is None:
            return 0
        scores = self._processors.scores(self._before, self._logits)
        theirs = scores.gather(1, tokens[:, None])
        least = scores.amax(dim=-1, keepdim=True) if self.case.sampling.temperature == 0.0 else float("-inf")
        left = theirs >= least if isinstance(least, Tensor) else theirs > least
        self._before = torch.cat([self._before, tokens[:, None]], dim=1)
        return int(left.sum())


def measure_sampling(
    rows: int,
    words: int,
    *,
    repeats: int,
    cases: Sequence[SamplingCase] = CASES,
    on_progress: Callable[[str], None] = lambda name: None,
) -> SamplingReport:
    """Every case as often, in turns, after a round that is not counted.

    Args:
        rows: Of a step.
        words: Of the vocabulary.
        repeats: Rounds. In each a softmax stands right before every choice, ours and transformers'.
        cases: What rows ask for.
        on_progress: Told the name of each case before it runs.
    """
    logits = {shape: drawn_logits(shape, rows, words) for shape in dict.fromkeys(case.shape for case in cases)}
    running = [_Running(case, logits[case.shape]) for case in cases]
    found = [CaseTimes(case.name, case.shape, case.bar) for case in cases]
    same = next(iter(logits.values()))
    kept = torch.empty_like(same)
    rewritten: list[tuple[float, float]] = []
    with torch.inference_mode():
        for number in range(repeats + 1):
            plain = _seconds(lambda: same.softmax(dim=-1))[0], _seconds(lambda: torch.softmax(same, -1, out=kept))[0]
            rewritten += [plain] if number else []
            for each, times in zip(running, found, strict=True):
                on_progress(each.case.name)
                softmax, _ = _seconds(each.softmax)
                seconds, tokens = _seconds(each.ours)
                ours, theirs = (softmax, seconds), None
                if each.case.rival:
                    theirs = _seconds(each.softmax)[0], _seconds(each.theirs)[0]
                    times.checked += rows
                    times.allowed += each.allowed(tokens)
                if number:
                    times.ours.append(ours)
                    times.theirs += [theirs] if theirs else []
    sizes: dict[str, int] = {shape: nucleus(each, 0.9) for shape, each in logits.items()}
    return SamplingReport(rows, words, torch.get_num_threads(), repeats, sizes, found, rewritten)


def _seconds(work: Callable[[], _Made]) -> tuple[float, _Made]:
    started = time.perf_counter()
    made = work()
    return time.perf_counter() - started, made
