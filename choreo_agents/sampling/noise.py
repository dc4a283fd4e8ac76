"""Random numbers that are a function of seed, step and token, and of nothing else.

They are made of integers only. The same token gets the same noise in any batch, order, device and number of threads,
and a step that is computed again draws the same tokens.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch
from torch import Tensor

NoiseKey = tuple[int, int, int, int]
"""Key of one step of one decode: two int32 for each of the two hashes."""
FIRST_BITS = 31
"""Bits of the uniform number that `first_bits` returns."""
_FACTORS = (0x7FEB352D, 0x846CA68B)
_WORD = (1 << 32) - 1
_BELOW_ONE = math.nextafter(1.0, 0.0)
"""Upper bound on uniform numbers: noise would be infinite at 1."""


def _int32(number: int) -> Tensor:
    return torch.tensor(number - (1 << 32) if number >= 1 << 31 else number, dtype=torch.int32)


# Tensors of the operands' type: Python numbers would be converted for every operation.
_SHIFTS = {by: (_int32(by), _int32(_WORD >> by)) for by in (15, 16)}
_MULTIPLIERS = [_int32(factor) for factor in _FACTORS]
_FIRST = _int32((1 << FIRST_BITS) - 1)


def noise_key(seed: int, step: int) -> NoiseKey:
    """Derive the key of a step of a decode."""
    one, two, three, four = struct.unpack("<4i", hashlib.blake2b(f"{seed} {step}".encode(), digest_size=16).digest())
    return one, two, three, four


def first_bits(ids: Tensor, key: NoiseKey) -> Tensor:
    """Compute the first 31 bits of each token's uniform number, as int32, for int32 token ids."""
    bits = _folded(ids + _int32(key[0]), 16).mul_(_MULTIPLIERS[0]).bitwise_xor_(_int32(key[1]))
    bits = _folded(bits, 15).mul_(_MULTIPLIERS[1])
    return _folded(bits, 16).bitwise_and_(_FIRST)


def _folded(bits: Tensor, by: int) -> Tensor:
    """Combine the high bits with the low ones, in place; int32 shifts extend the sign, which is masked off."""
    shift, unsigned = _SHIFTS[by]
    return bits.bitwise_xor_(torch.bitwise_right_shift(bits, shift).bitwise_and_(unsigned))


def gumbel(word: int, key: NoiseKey) -> float:
    """Return the Gumbel noise of a token: the argmax of logits plus noise is a sample from their softmax."""
    first, low = hashed(word, key[0], key[1]) & ((1 << FIRST_BITS) - 1), hashed(word, key[2], key[3])
    # The 63 bits of both, and half a unit: never 0. Small numbers decide most draws, and have all their bits.
    uniform = first * 2.0**-FIRST_BITS + (low + 0.5) * 2.0 ** -(FIRST_BITS + 32)
    return -math.log(-math.log1p(-min(uniform, _BELOW_ONE)))


def hashed(word: int, key: int, later: int) -> int:
    """Hash a token and two keys to 32 bits: lowbias32, with the second key mixed in between."""
    bits = (word + key) & _WORD
    bits = (((bits ^ bits >> 16) * _FACTORS[0]) ^ later) & _WORD
    bits = (bits ^ bits >> 15) * _FACTORS[1] & _WORD
    return bits ^ bits >> 16
