"""Keys and values as whole numbers of eight bits, with one power of two for each head of each token."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
LEAST = -112
"""Of exponents: what is smaller is nothing."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest whole numbers, and what they are to be multiplied with: `x` is about `numbers * 2**exponents`.

    Of what was rounded so before, the numbers come out the same: `rounded(rounded(x))` has the bits of `rounded(x)`.

    Args:
        x: [..., head_dim], finite.

    Returns:
        Numbers [..., head_dim] and exponents [...], both of eight bits.
    """
    _, exponents = torch.frexp(x.abs().amax(-1, keepdim=True).float())
    # The largest of a head comes to lie between 64 and 127.
    exponents = (exponents - 7).clamp(LEAST, LARGEST)
    numbers = torch.ldexp(x.float(), -exponents).round().clamp(-LARGEST, LARGEST)
    return numbers.to(torch.int8), exponents.squeeze(-1).to(torch.int8)


def dequantize(numbers: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize` rounded to, exactly, in any of the types that models compute in."""
    return torch.ldexp(numbers.float(), exponents.to(torch.int32).unsqueeze(-1)).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """`x`, [..., head_dim], at the precision that is kept of it: off by less than 1 % of a head's largest."""
    return dequantize(*quantize(x), x.dtype)
