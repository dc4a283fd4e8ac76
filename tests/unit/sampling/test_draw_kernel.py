"""Tokens that are drawn in one launch are those that torch's operators draw, whatever rows look like."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from choreo_agents.sampling import BatchSampler, Draw, DrawKernel, DrawnTokens, Sampling
from choreo_agents.sampling.noise import noise_key

pytest.importorskip("triton", reason="the extra `kernels` is not installed: make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make test-triton sets it", allow_module_level=True)

from choreo_agents.sampling import kernel as kernel_module

SURE, NEAR, UNSURE = range(3)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 1, 5, 400]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(kernel_module.CONSTANTS, "BLOCK", 256)
        yield


def draw_kernel() -> DrawKernel:
    made = DrawKernel.on(torch.device("cpu"))
    assert made is not None
    return made


def rows_of(seed: int, count: int, words: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(count, words, generator=torch.Generator().manual_seed(seed))
    return (drawn * scale).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 5, 130, 1000]),
    st.sampled_from([0.0, 0.1, 1.0, 10.0, 100.0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(samplings, min_size=1, max_size=4),
    st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
)
def test_the_same_tokens(seed, words, scale, dtype, wanted, strange) -> None:
    logits = rows_of(seed, len(wanted), words, scale, dtype)
    if strange is not None and words > 1:
        logits[0, seed % words] = strange
    draws = [Draw(each, noise_key(seed, row)) for row, each in enumerate(wanted)]
    before = logits.clone()
    assert BatchSampler(draw_kernel()).draw(logits, draws) == BatchSampler().draw(logits, draws)
    assert torch.equal(logits.nan_to_num(1.5), before.nan_to_num(1.5))


def test_some_rows_in_any_order_and_those_that_are_changed_beside_them() -> None:
    logits, mask = rows_of(3, 5, 300, 2.0), torch.arange(300) % 3 == 0
    warm = Sampling(temperature=1.0, top_p=0.9)
    draws = [Draw(warm, noise_key(1, i), mask if i == 1 else None) for i in range(3)]
    found = BatchSampler(draw_kernel()).draw(logits, draws, [4, 0, 2])
    assert found == BatchSampler().draw(logits, draws, [4, 0, 2])
    told: list[DrawnTokens] = []
    BatchSampler(draw_kernel()).draw(logits, draws, [4, 0, 2], told.append)
    assert not told, "nobody goes ahead with the words of some rows"
    BatchSampler(draw_kernel()).draw(logits, [draws[0], draws[2]], [4, 2], told.append)
    assert told[0].guessed() == [found[0], found[2]] == told[0].guesses.tolist()


def test_a_row_of_a_model_is_all_but_always_sure() -> None:
    kinds: Counter[int] = Counter()
    for seed in range(3):
        logits = rows_of(seed, 8, 2000, 3.0, torch.bfloat16)
        for wanted in (Sampling(temperature=0.7, top_p=0.95), Sampling(temperature=1.0, top_k=50)):
            draws = [Draw(wanted, noise_key(seed, row)) for row in range(8)]
            drawn = draw_kernel().draw(logits, range(8), draws)
            assert drawn is not None
            kinds.update(row[2] for row in drawn._results)
    assert kinds[SURE] >= 0.95 * kinds.total()


def test_who_are_near_each_other_are_decided_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of(5, 64, 40, 1.0)
    draws = [Draw(Sampling(temperature=1.0), noise_key(9, row)) for row in range(64)]
    wanted = BatchSampler().draw(logits, draws)
    monkeypatch.setitem(kernel_module.CONSTANTS, "MARGIN", 0.7)
    drawn = draw_kernel().draw(logits, range(64), draws)
    assert drawn is not None
    kinds = Counter(row[2] for row in drawn._results)
    assert kinds[SURE] > 8 and kinds[NEAR] > 4 and kinds[UNSURE] > 2, "all of them are met"
    for token, exact in zip(drawn.tokens(), wanted, strict=True):
        assert token in (None, exact)
    assert BatchSampler(draw_kernel()).draw(logits, draws) == wanted


def test_of_two_that_are_near_the_second_may_be_higher(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of(5, 1, 40, 1.0)
    draw = Draw(Sampling(temperature=1.0), noise_key(9, 0))
    [wanted] = BatchSampler().draw(logits, [draw])
    drawn = draw_kernel().draw(logits, [0], [draw])
    assert drawn is not None
    row = drawn._results[0]
    other = next(word for word in range(40) if word != wanted)
    bits = logits[0].view(torch.int32)
    drawn._results = [[other, wanted, NEAR, int(bits[other]), int(bits[wanted]), row[5]]]
    assert drawn.tokens() == [wanted] and drawn.guessed() == [other]


def test_a_kernel_that_cannot_be_had_is_gone_without(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from choreo_agents.sampling import triton_kernel

    class Refuses:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("out of registers")

    monkeypatch.setattr(triton_kernel, "draw_kernel", Refuses())
    logits, draws = rows_of(1, 2, 50, 1.0), [Draw(Sampling()), Draw(Sampling(temperature=1.0), noise_key(2, 0))]
    sampler = BatchSampler(draw_kernel())
    assert sampler.draw(logits, draws) == sampler.draw(logits, draws) == BatchSampler().draw(logits, draws)
    assert caplog.text.count("out of registers") == 1
