"""Eight bits for each number: close, the same when rounded again, and exact in every type that models compute in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.kv.quantization import LARGEST, dequantize, quantize, rounded

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def drawn(seed: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.empty(2, 3, 5, 1).uniform_(-2, 2, generator=generator)
    x = torch.randn(2, 3, 5, 8, generator=generator) * spread * scale
    x[0, 0, 0] = 0
    return x.to(dtype)


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES), scale=st.sampled_from([1e-6, 1e-2, 1.0, 60.0]))
def test_rounding_is_close_and_changes_nothing_the_second_time(seed: int, dtype: torch.dtype, scale: float) -> None:
    x = drawn(seed, dtype, scale)
    once = rounded(x)
    assert once.dtype == dtype and torch.equal(rounded(once), once)
    largest = x.double().abs().amax(-1, keepdim=True)
    # Half a step, of which there are 64 at least; what lies above the last step goes down to it.
    assert ((once.double() - x.double()).abs() <= largest / 127).all()
    numbers, exponents = quantize(once)
    assert numbers.dtype == exponents.dtype == torch.int8 and torch.equal(dequantize(numbers, exponents, dtype), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_of_a_head_uses_all_bits(dtype: torch.dtype) -> None:
    numbers, _ = quantize(drawn(3, dtype, 1.0)[:, 1:])
    largest = numbers.abs().amax(-1)
    assert (largest >= 64).all() and (largest <= LARGEST).all()


def test_numbers_are_what_a_head_is_a_multiple_of() -> None:
    numbers, exponents = quantize(torch.tensor([[1.0, -0.5, 0.0, 1.2], [0.0, 0.0, 0.0, 0.0]]))
    # 1.2 lies between 64 and 127 sixty-fourths.
    assert exponents[0] == -6 and numbers.tolist() == [[64, -32, 0, 77], [0, 0, 0, 0]]
