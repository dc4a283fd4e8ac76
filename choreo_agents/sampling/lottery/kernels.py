"""A row's winner in one launch: what decides it, as near as single precision tells, and whether that is near enough."""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_INFINITY = tl.constexpr(-2139095041)
"""As `_ordered` has it."""


@triton.jit
def _hashed(words, key, later):
    """32 bits of words and two keys: see `noise.hashed`."""
    bits = words + key
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) ^ later
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _energy(words, key, later, key2, later2):
    """-ln(1 - u) of the words' uniform numbers, to a few parts in 10**5; see `noise.gumbel`."""
    first = (_hashed(words, key, later) & 0x7FFFFFFF).to(tl.int32)
    rest = _hashed(words, key2, later2)
    low = (first.to(tl.float32) + (rest.to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-31
    high = ((0x7FFFFFFF - first).to(tl.float32) + ((0xFFFFFFFF - rest).to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-31
    series = low * (1.0 + low * (0.5 + low * (0.33333333 + low * 0.25)))
    return tl.where(low < 0.015625, series, -tl.log(high))


@triton.jit
def _exponents(logits, lanes, words, top, scale):
    """Some words' logits, and these as exponents of 2 beside the highest."""
    x = tl.load(logits + lanes, mask=lanes < words, other=float("-inf")).to(tl.float32)
    return x, (x - top) * scale


@triton.jit
def _ordered(number):
    """An fp32 number as an integer that is as far up among integers as it is among numbers; and back."""
    return number ^ ((number >> 31) & 0x7FFFFFFF)


@triton.jit
def _kept(logits, words, top, top_k, BLOCK: tl.constexpr):
    """The lowest logit of the `top_k` highest, found by halving."""
    lanes = tl.arange(0, BLOCK)
    low = tl.full((), MINUS_INFINITY, tl.int64)
    high = _ordered(top.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        least = _ordered(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        count = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, words, BLOCK):
            x = tl.load(logits + start + lanes, mask=start + lanes < words, other=float("-inf")).to(tl.float32)
            count += ((x >= least) & (start + lanes < words)).to(tl.int32)
        found = tl.sum(count)
        low = tl.where(found >= top_k, middle, low)
        high = tl.where(found > top_k, high, tl.where(found == top_k, middle + 1, middle))
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def draw_kernel(
    logits,
    asked,
    out,
    stride,
    words,
    BLOCK: tl.constexpr,
    ASKED: tl.constexpr,
    TOLD: tl.constexpr,
    MARGIN: tl.constexpr,
    LOST: tl.constexpr,
    ALIKE: tl.constexpr,
    LEAST: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    """See `Lottery`: from [rows, stride] logits and [draws, ASKED] to [draws, TOLD]; programs: (draw,)."""
    mine, told = asked + tl.program_id(0) * ASKED, out + tl.program_id(0) * TOLD
    logits += tl.load(mine).to(tl.int64) * stride
    top_k = tl.load(mine + 1)
    scale = tl.load(mine + 2).to(tl.float32, bitcast=True)
    least = tl.load(mine + 3).to(tl.float32, bitcast=True)
    top_p = tl.load(mine + 4).to(tl.float32, bitcast=True)
    lanes = tl.arange(0, BLOCK)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, words, BLOCK):
        x = tl.load(logits + start + lanes, mask=start + lanes < words, other=float("-inf")).to(tl.float32)
        strange = tl.where(x != x, 1, strange)
        at = tl.where(x > best, start + lanes, at)
        best = tl.where(x > best, x, best)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, at, words), 0)
    second = first
    kind = tl.where((tl.max(strange, 0) == 0) & (top > LOWEST) & (top <= HIGHEST), 0, 2)

    if (kind == 0) & (scale > 0.0):
        bound = tl.full((), float("-inf"), tl.float32)
        if top_k > 0:
            bound = _kept(logits, words, top, top_k, BLOCK)
        total = tl.full((), 1.0, tl.float32)
        if top_p < 1.0:
            weights = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, words, BLOCK):
                x, own = _exponents(logits, start + lanes, words, top, scale)
                weights += tl.where(x >= bound, tl.exp2(own), 0.0)
            total = tl.sum(weights, 0)
        key, later = tl.load(mine + 5).to(tl.uint32, bitcast=True), tl.load(mine + 6).to(tl.uint32, bitcast=True)
        key2, later2 = tl.load(mine + 7).to(tl.uint32, bitcast=True), tl.load(mine + 8).to(tl.uint32, bitcast=True)
        ruled_out = tl.full((), -1.0, tl.float32)
        goes_on = 1
        while goes_on > 0:
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            next_best = best
            at = tl.zeros((BLOCK,), tl.int32)
            next_at = at
            for start in range(0, words, BLOCK):
                x, own = _exponents(logits, start + lanes, words, top, scale)
                ids = (start + lanes).to(tl.uint32)
                score = own - tl.log2(_energy(ids, key, later, key2, later2))
                may = (x >= bound) & (own >= least) & (tl.exp2(own) > ruled_out)
                score = tl.where(may, score, float("-inf"))
                is_best, is_next = score > best, score > next_best
                next_at = tl.where(is_best, at, tl.where(is_next, start + lanes, next_at))
                next_best = tl.where(is_best, best, tl.where(is_next, score, next_best))
                at = tl.where(is_best, start + lanes, at)
                best = tl.where(is_best, score, best)
            high = tl.max(best, 0)
            first = tl.min(tl.where(best == high, at, words), 0)
            is_first = at == first
            others = tl.where(is_first, next_best, best)
            others_at = tl.where(is_first, next_at, at)
            high2 = tl.max(others, 0)
            second = tl.min(tl.where(others == high2, others_at, words), 0)
            # Of a lane whose two best are both taken, the third is not known: it is no higher than the second.
            left = tl.where(others_at == second, tl.where(is_first, others, next_best), others)
            is_near, is_crowded = high - high2 <= MARGIN, high - tl.max(left, 0) <= MARGIN
            kind = tl.where(is_crowded, 2, tl.where(is_near, 1, 0))
            goes_on = 0
            if (top_p < 1.0) & (kind < 2):
                mine_weight = tl.exp2((tl.load(logits + first).to(tl.float32) - top) * scale)
                other = tl.exp2((tl.load(logits + second).to(tl.float32) - top) * scale)
                is_other = is_near & (other < mine_weight)
                weight, it = tl.where(is_other, other, mine_weight), tl.where(is_other, second, first)
                its = tl.load(logits + it).to(tl.float32)
                upto = tl.zeros((BLOCK,), tl.float32)
                above = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, words, BLOCK):
                    x, own = _exponents(logits, start + lanes, words, top, scale)
                    own = tl.where(x >= bound, tl.exp2(own), 0.0)
                    is_behind = (x == its) & (start + lanes >= it)
                    upto += tl.where((own > weight * (1.0 - ALIKE) - LEAST) & ~is_behind, own, 0.0)
                    above += tl.where(own > mine_weight * (1.0 + ALIKE) + LEAST, own, 0.0)
                if tl.sum(upto, 0) * (1.0 + LOST) >= top_p * total * (1.0 - LOST):
                    kind = 2
                    if (tl.sum(above, 0) >= top_p * total * (1.0 + LOST)) & (mine_weight > ruled_out):
                        ruled_out = mine_weight
                        goes_on = 1
    tl.store(told, first)
    tl.store(told + 1, second)
    tl.store(told + 2, kind)
    tl.store(told + 3, tl.load(logits + first).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(told + 4, tl.load(logits + second).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(told + 5, top.to(tl.int32, bitcast=True))
