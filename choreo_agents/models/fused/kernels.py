"""Triton kernels between the matrix products of a decoder layer, which round where the modelling code does, except
angles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x,
    added,
    weight,
    out,
    width,
    eps,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add a block's output to the residual stream, and normalise the sum. [rows, width]; programs: (row,)."""
    row = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, WIDTH)
    is_there = d < width
    own = tl.load(x + row + d, mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        own += tl.load(added + row + d, mask=is_there, other=0.0).to(tl.float32)
        rounded = own.to(x.dtype.element_ty)
        tl.store(x + row + d, rounded, mask=is_there)
        own = rounded.to(tl.float32)
    normed = own * (1.0 / tl.sqrt(tl.sum(own * own) / width + eps))
    factor = tl.load(weight + d, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row + d, normed.to(x.dtype.element_ty).to(tl.float32) * factor, mask=is_there)


@triton.jit
def turn_kernel(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    out,
    wide,
    eps,
    QUERIES: tl.constexpr,
    TURNED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TURNED_FROM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalise each query and key head, if `NORMS`, and rotate it to its token's position.

    From the first `TURNED` heads of [tokens, wide] to [tokens, TURNED, DIM]; angles [tokens, HALF], fp32. Programs:
    (token, some heads).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    is_head = head < TURNED
    is_there = is_head[:, None] & (d < DIM)[None, :]
    own = qkv + token * wide + head[:, None] * DIM
    x = tl.load(own + d[None, :], mask=is_there, other=0.0).to(tl.float32)
    scale = tl.full((HEADS,), 1.0, tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps)
        factor = tl.where(
            (head < QUERIES)[:, None],
            tl.load(query_norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :],
            tl.load(key_norm + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :],
        )
        x = (x * scale[:, None]).to(qkv.dtype.element_ty).to(tl.float32) * factor
        x = x.to(qkv.dtype.element_ty).to(tl.float32)
    if HALF > 0:
        # `y` is the mate of dimension `x` in its pair: x cos - y sin for the first, x cos + y sin for the second.
        r = d - TURNED_FROM
        turns = (r >= 0) & (r < 2 * HALF)
        if NEIGHBOURS:
            angle, is_first = r // 2, r % 2 == 0
            mate = tl.where(is_first, d + 1, d - 1)
        else:
            angle, is_first = r % HALF, r < HALF
            mate = tl.where(is_first, d + HALF, d - HALF)
        angle, mate = tl.where(turns, angle, 0), tl.where(turns, mate, 0)
        is_turned = is_head[:, None] & turns[None, :]
        y = tl.load(own + mate[None, :], mask=is_turned, other=0.0).to(tl.float32)
        if NORMS:
            factor = tl.where(
                (head < QUERIES)[:, None],
                tl.load(query_norm + mate, mask=turns, other=0.0).to(tl.float32)[None, :],
                tl.load(key_norm + mate, mask=turns, other=0.0).to(tl.float32)[None, :],
            )
            y = (y * scale[:, None]).to(qkv.dtype.element_ty).to(tl.float32) * factor
            y = y.to(qkv.dtype.element_ty).to(tl.float32)
        c = tl.load(cos + token * HALF + angle, mask=turns, other=1.0)[None, :]
        s = tl.load(sin + token * HALF + angle, mask=turns, other=0.0)[None, :]
        x = x * c + tl.where(is_first[None, :], -y, y) * s
    tl.store(out + (token * TURNED + head[:, None]) * DIM + d[None, :], x, mask=is_there)


@triton.jit
def gate_kernel(gate_up, out, inner, TOGETHER: tl.constexpr):
    """Compute silu(gate) * up: [rows, 2 * inner] to [rows, inner]. Programs: (row, block of numbers)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    is_there = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=is_there, other=0.0).to(tl.float32)
    gated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * inner + at, gated * up, mask=is_there)
