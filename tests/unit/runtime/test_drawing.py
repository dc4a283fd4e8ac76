"""Tokens that the kernels in C draw are those that torch's operators draw, whatever rows look like."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from choreo_agents.native.library import Kernels, available_kernels
from choreo_agents.runtime.executor import draw_kernel_on, native_draw_kernel
from choreo_agents.sampling import BatchSampler, Draw, Sampling
from choreo_agents.sampling.draw import CountedTokens
from choreo_agents.sampling.kernel import CONSTANTS
from choreo_agents.sampling.noise import noise_key

KERNELS = available_kernels()
pytestmark = pytest.mark.skipif(isinstance(KERNELS, str), reason=f"there are no kernels: {KERNELS}")
VARIANTS: tuple[Kernels, ...] = () if isinstance(KERNELS, str) else KERNELS
SURE, NEAR, UNSURE = range(3)
CPU = torch.device("cpu")
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0, 1e12]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


def rows_of(seed: int, count: int, words: int, scale: float) -> torch.Tensor:
    return torch.randn(count, words, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    words=st.sampled_from([1, 5, 130, 1000, 5003]),
    scale=st.sampled_from([0.0, 1e-8, 0.1, 1.0, 10.0, 100.0, 1e30]),
    is_short=st.booleans(),
    wanted=st.lists(samplings, min_size=1, max_size=4),
    strange=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
)
def test_the_same_tokens(
    seed: int, words: int, scale: float, is_short: bool, wanted: list[Sampling], strange: float | None
) -> None:
    logits = rows_of(seed, len(wanted), words, scale)
    logits = logits.bfloat16().float() if is_short else logits  # many ties
    if strange is not None and words > 1:
        logits[0, seed % words] = strange
    draws = [Draw(each, noise_key(seed, row)) for row, each in enumerate(wanted)]
    before, exact = logits.clone(), BatchSampler().draw(logits, draws)
    for kernels in VARIANTS:
        assert BatchSampler(native_draw_kernel(kernels)).draw(logits, draws) == exact, kernels.name
    assert torch.equal(logits.nan_to_num(1.5), before.nan_to_num(1.5))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_draws_the_same_in_any_company_and_all_but_always_for_sure(threads: int) -> None:
    kinds: Counter[int] = Counter()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kernels in VARIANTS:
            kernel = native_draw_kernel(kernels)
            for wanted in (Sampling(temperature=0.7, top_p=0.95), Sampling(temperature=1.0, top_k=50)):
                logits = rows_of(3, 24, 8000, 3.0)
                draws = [Draw(wanted, noise_key(5, row)) for row in range(24)]
                together = kernel.draw(logits, range(24), draws)
                assert together is not None
                alone = [kernel.draw(logits, [row], [draws[row]]) for row in range(24)]
                assert together._results == [each._results[0] for each in alone if each is not None]
                kinds.update(row[2] for row in together._results)
    finally:
        torch.set_num_threads(before)
    assert kinds[SURE] >= 0.95 * kinds.total()


def test_who_are_near_each_other_are_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of(5, 64, 40, 1.0)
    draws = [Draw(Sampling(temperature=1.0), noise_key(9, row)) for row in range(64)]
    wanted = BatchSampler().draw(logits, draws)
    monkeypatch.setitem(CONSTANTS, "MARGIN", 0.7)
    for kernels in VARIANTS:
        kernel = native_draw_kernel(kernels)
        drawn = kernel.draw(logits, range(64), draws)
        assert drawn is not None
        kinds = Counter(row[2] for row in drawn._results)
        assert kinds[SURE] > 8 and kinds[NEAR] > 4 and kinds[UNSURE] > 2, "all of them are met"
        for token, exact in zip(drawn.tokens(), wanted, strict=True):
            assert token in (None, exact)
        assert BatchSampler(kernel).draw(logits, draws) == wanted


def test_what_the_nucleus_leaves_out_is_not_drawn_however_lucky() -> None:
    logits = torch.full((1, 4096), -9.0)
    logits[0, 77] = 0.0
    likely = Sampling(temperature=1.0, top_p=0.6)  # the first word has 0.66, all others 0.34 together
    lucky = 0
    for seed in range(400):
        draw = Draw(likely, noise_key(seed, 0))
        exact = BatchSampler().draw(logits, [draw])
        lucky += BatchSampler().draw(logits, [Draw(Sampling(temperature=1.0), draw.noise)]) != [77]
        for kernels in VARIANTS:
            assert BatchSampler(native_draw_kernel(kernels)).draw(logits, [draw]) == exact == [77]
    assert lucky > 40, "without it they would be"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    words=st.sampled_from([1, 5, 130, 5003]),
    allowed=st.sampled_from([1, 2, 3, 100]),
    wanted=st.lists(samplings, min_size=1, max_size=4),
)
def test_rows_that_masks_and_penalties_change_are_drawn_from_copies(
    seed: int, words: int, allowed: int, wanted: list[Sampling]
) -> None:
    logits, mask = rows_of(seed, len(wanted), words, 3.0), torch.zeros(words, dtype=torch.bool)
    mask[torch.randperm(words, generator=torch.Generator().manual_seed(seed))[:allowed]] = True
    draws = []
    for row, sampling in enumerate(wanted):
        counted = CountedTokens(sampling.model_copy(update={"presence_penalty": 1.5}), [0], CPU)
        counted.add(seed % words)
        masks, penalties = (None, mask, mask)[row % 3], (counted.penalties(), None, counted.penalties())[row % 3]
        draws.append(Draw(sampling, noise_key(seed, row), masks, penalties))
    before, exact = logits.clone(), BatchSampler().draw(logits, draws)
    for kernels in VARIANTS:
        assert BatchSampler(native_draw_kernel(kernels)).draw(logits, draws) == exact, kernels.name
    assert torch.equal(logits, before)


def test_it_draws_in_fp32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = draw_kernel_on(CPU)
    assert kernel is not None
    logits, draws = rows_of(1, 2, 50, 1.0), [Draw(Sampling(temperature=1.0), noise_key(2, row)) for row in range(2)]
    assert kernel.draw(logits.bfloat16(), range(2), draws) is None
    assert kernel.draw(logits.T.contiguous().T, range(2), draws) is None
    told: list[Any] = []
    tokens = BatchSampler(kernel).draw(logits, draws, meanwhile=told.append)
    assert told[0].guessed() == tokens == BatchSampler().draw(logits, draws)


def test_a_third_that_shares_a_lane_with_the_two_highest_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 100), float("-inf"))
    logits[0, [3, 35, 67]] = 0.0  # of vectors of eight and of sixteen the same place
    monkeypatch.setitem(CONSTANTS, "MARGIN", 50.0)
    for kernels in VARIANTS:
        drawn = native_draw_kernel(kernels).draw(logits, [0], [Draw(Sampling(temperature=1.0), noise_key(1, 0))])
        assert drawn is not None and drawn._results[0][2] == UNSURE
