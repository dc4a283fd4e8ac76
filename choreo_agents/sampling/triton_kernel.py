"""Triton kernel that draws the token of each row in single precision, and reports whether that is precise enough."""

from __future__ import annotations

import triton
import triton.language as tl

MINUS_INFINITY = tl.constexpr(-2139095041)
"""Minus infinity as mapped by `_ordered`."""


@triton.jit
def _hashed(words, key, later):
    """Hash tokens and two keys to 32 bits, as `noise.hashed`."""
    bits = words + key
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) ^ later
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _energy(words, key, later, key2, later2):
    """Compute -ln(1 - u) of the tokens' uniform numbers, to a few parts in 10**5; see `noise.gumbel`."""
    first = (_hashed(words, key, later) & 0x7FFFFFFF).to(tl.int32)
    tail = _hashed(words, key2, later2)
    low = (first.to(tl.float32) + (tail.to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-31
    high = ((0x7FFFFFFF - first).to(tl.float32) + ((0xFFFFFFFF - tail).to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-31
    series = low * (1.0 + low * (0.5 + low * (0.33333333 + low * 0.25)))
    return tl.where(low < 0.015625, series, -tl.log(high))


@triton.jit
def _exponents(logits, lanes, words, top, scale):
    """Load some tokens' logits; return them, and their exponents of 2 relative to the highest."""
    x = tl.load(logits + lanes, mask=lanes < words, other=float("-inf")).to(tl.float32)
    return x, (x - top) * scale


@triton.jit
def _ordered(number):
    """Map the bits of fp32 numbers to integers of the same order; it is its own inverse."""
    return number ^ ((number >> 31) & 0x7FFFFFFF)


@triton.jit
def _top_k_bound(logits, words, top, top_k, BLOCK: tl.constexpr):
    """Find the lowest of the `top_k` highest logits by bisection."""
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
        total = tl.sum(count)
        low = tl.where(total >= top_k, middle, low)
        high = tl.where(total > top_k, high, tl.where(total == top_k, middle + 1, middle))
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def draw_kernel(
    logits,
    draws,
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
    """Draw tokens from [rows, stride] logits and [draws, ASKED] settings to [draws, TOLD]. Programs: (draw,)."""
    draw, result = draws + tl.program_id(0) * ASKED, out + tl.program_id(0) * TOLD
    logits += tl.load(draw).to(tl.int64) * stride
    top_k = tl.load(draw + 1)
    scale = tl.load(draw + 2).to(tl.float32, bitcast=True)
    least = tl.load(draw + 3).to(tl.float32, bitcast=True)
    top_p = tl.load(draw + 4).to(tl.float32, bitcast=True)
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
            bound = _top_k_bound(logits, words, top, top_k, BLOCK)
        total = tl.full((), 1.0, tl.float32)
        if top_p < 1.0:
            weights = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, words, BLOCK):
                x, own = _exponents(logits, start + lanes, words, top, scale)
                weights += tl.where(x >= bound, tl.exp2(own), 0.0)
            total = tl.sum(weights, 0)
        key, later = tl.load(draw + 5).to(tl.uint32, bitcast=True), tl.load(draw + 6).to(tl.uint32, bitcast=True)
        key2, later2 = tl.load(draw + 7).to(tl.uint32, bitcast=True), tl.load(draw + 8).to(tl.uint32, bitcast=True)
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
            second_best = tl.where(is_first, next_best, best)
            second_at = tl.where(is_first, next_at, at)
            high2 = tl.max(second_best, 0)
            second = tl.min(tl.where(second_best == high2, second_at, words), 0)
            # A lane keeps two scores: if both are the best two of the row, its third is bounded by its second.
            third_best = tl.where(second_at == second, tl.where(is_first, second_best, next_best), second_best)
            is_near, is_crowded = high - high2 <= MARGIN, high - tl.max(third_best, 0) <= MARGIN
            kind = tl.where(is_crowded, 2, tl.where(is_near, 1, 0))
            goes_on = 0
            if (top_p < 1.0) & (kind < 2):
                first_weight = tl.exp2((tl.load(logits + first).to(tl.float32) - top) * scale)
                second_weight = tl.exp2((tl.load(logits + second).to(tl.float32) - top) * scale)
                is_second = is_near & (second_weight < first_weight)
                weight, word = tl.where(is_second, second_weight, first_weight), tl.where(is_second, second, first)
                word_logit = tl.load(logits + word).to(tl.float32)
                upto = tl.zeros((BLOCK,), tl.float32)
                above = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, words, BLOCK):
                    x, own = _exponents(logits, start + lanes, words, top, scale)
                    own = tl.where(x >= bound, tl.exp2(own), 0.0)
                    is_behind = (x == word_logit) & (start + lanes >= word)
                    upto += tl.where((own > weight * (1.0 - ALIKE) - LEAST) & ~is_behind, own, 0.0)
                    above += tl.where(own > first_weight * (1.0 + ALIKE) + LEAST, own, 0.0)
                if tl.sum(upto, 0) * (1.0 + LOST) >= top_p * total * (1.0 - LOST):
                    kind = 2
                    if (tl.sum(above, 0) >= top_p * total * (1.0 + LOST)) & (first_weight > ruled_out):
                        ruled_out = first_weight
                        goes_on = 1
    tl.store(result, first)
    tl.store(result + 1, second)
    tl.store(result + 2, kind)
    tl.store(result + 3, tl.load(logits + first).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(result + 4, tl.load(logits + second).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(result + 5, top.to(tl.int32, bitcast=True))
