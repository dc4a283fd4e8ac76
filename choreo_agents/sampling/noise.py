"""Random numbers that are a function of a seed, a step and a word, and of nothing else.

Integers alone: whoever shares the batch, in which order, on which device and with how many threads, the same words get
the same noise, and a step that is computed again draws what it drew.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch
from torch import Tensor

NoiseKey = tuple[int, int, int, int]
"""Of one step of one decode, as int32: two numbers for each of the hashes."""
FIRST_BITS = 31
"""Of the uniform number that `first_bits` gives."""
_FACTORS = (0x7FEB352D, 0x846CA68B)
_WORD = (1 << 32) - 1
_BELOW_ONE = math.nextafter(1.0, 0.0)
"""What uniform numbers are that would be rounded to 1, of which there is no noise."""


def _int32(number: int) -> Tensor:
    return torch.tensor(number - (1 << 32) if number >> 31 else number, dtype=torch.int32)


# Constants of the tensors' own type: others would be converted for every operation.
_SHIFTS = {by: (_int32(by), _int32(_WORD >> by)) for by in (15, 16)}
_MULTIPLIERS = [_int32(factor) for factor in _FACTORS]
_FIRST = _int32((1 << FIRST_BITS) - 1)


def noise_key(seed: int, step: int) -> NoiseKey:
    """What tells the noise of a decode's step from that of all others."""
    one, two, three, four = struct.unpack("<4i", hashlib.blake2b(f"{seed} {step}".encode(), digest_size=16).digest())
    return one, two, three, four


def first_bits(ids: Tensor, keys: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """The first 31 bits of the uniform number of each word, as int32.

    Args:
        ids: int32, [words] or [rows, words].
        keys: A `NoiseKey` for each row: int32, [rows, 4].
        out: Becomes the result: int32, [rows, words], as is `spare`.
        spare: Is overwritten.
    """
    torch.add(ids, keys[:, 0:1], out=out)
    _fold(out, 16, spare)
    out.mul_(_MULTIPLIERS[0]).bitwise_xor_(keys[:, 1:2])
    _fold(out, 15, spare)
    out.mul_(_MULTIPLIERS[1])
    return _fold(out, 16, spare).bitwise_and_(_FIRST)


def _fold(bits: Tensor, by: int, spare: Tensor) -> Tensor:
    """Combine the high bits with the low ones; int32 is shifted with its sign, which is cut off."""
    shift, unsigned = _SHIFTS[by]
    torch.bitwise_right_shift(bits, shift, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_(unsigned))


def gumbel(word: int, key: NoiseKey) -> float:
    """Gumbel noise of one word: logits plus it are highest where a sample of their softmax is."""
    first, rest = hashed(word, key[0], key[1]) & ((1 << FIRST_BITS) - 1), hashed(word, key[2], key[3])
    # The 63 bits of both, and half a unit: never 0. Small ones decide most, and have all their bits.
    uniform = first * 2.0**-FIRST_BITS + (rest + 0.5) * 2.0 ** -(FIRST_BITS + 32)
    return -math.log(-math.log1p(-min(uniform, _BELOW_ONE)))


def hashed(word: int, key: int, later: int) -> int:
    """32 bits of a word and two keys: shifts and multiplications as in lowbias32, the second key between them."""
    bits = (word + key) & _WORD
    bits = (((bits ^ bits >> 16) * _FACTORS[0]) ^ later) & _WORD
    bits = (bits ^ bits >> 15) * _FACTORS[1] & _WORD
    return bits ^ bits >> 16
