"""Elementary functions made of correctly rounded operations: the same bits on every device and for every batch.

The last bit of a library's exp depends on the processor, the device, and a number's place in a vector, which changes
with the batch's shape and the number of threads. Sums, differences, products and quotients are rounded correctly
everywhere, if each is an operation of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HIGHEST = torch.finfo(torch.float32).max
LOW = -1e38
"""A row whose highest logit is below this may have no finite one."""
LOG2_E = math.log2(math.e)
_EXP2 = (0.0013264727202715709, 0.009671512658650858, 0.05550733743414529, 0.240222420850803, 0.6931469775989691)
"""Coefficients of 2**f = 1 + f * polynomial(f), highest power first, fitted for f from -1/2 to 1/2."""
_ROUND = 1.5 * 2**23
"""Added to a small fp32 number, leaves the nearest integer in its low bits."""
_MANTISSA_BITS = torch.tensor(23, dtype=torch.int32)
_LOWEST = -127.0
"""Exponent at and below which the power of 2 is 0 in fp32."""


def exp2_(exponents: Tensor) -> Tensor:
    """Compute 2 to the power of fp32 numbers <= 0, to a relative 2e-7: exactly 1 for 0, and 0 from -127 down.

    Args:
        exponents: Overwritten.
    """
    exponents.clamp_(min=_LOWEST)
    power = exponents + _ROUND
    exponent_bits = torch.bitwise_left_shift(power.view(torch.int32), _MANTISSA_BITS)
    exponents.sub_(power.sub_(_ROUND))
    torch.mul(exponents, _EXP2[0], out=power)
    for coefficient in _EXP2[1:]:
        power.add_(coefficient).mul_(exponents)
    power.add_(1.0)
    # The integral part is added to the exponent of a number between 0.7 and 1.5.
    power.view(torch.int32).add_(exponent_bits)
    return power


def rounded_for_sums(weights: Tensor) -> Tensor:
    """Return numbers between 0 and 1 as doubles, rounded so that the sum of a row of them is exact in any order."""
    shift = 1.5 * 2.0 ** (weights.shape[-1] - 1).bit_length()
    # A double next to `shift` has 52 bits after its first: lower bits are rounded away.
    return weights.double().add_(shift).sub_(shift)
