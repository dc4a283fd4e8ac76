"""Triton kernels that store, attend and merge. Scores are in bits: exp(x) = 2 ** (x * log2(e)).

pool      [kv_heads, slots, dim]                       tile    [first slot, from, upto, first row, rows]
query     [tokens, heads, dim]                         pair    [token, its row of angles, first slot seen, end]
outs      [pairs, heads, dim] fp32                     row     a pair's query in one of the `GROUP` heads of a key head
sums      [pairs, heads] fp32: log2 of summed 2**score
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def store_kernel(
    key,
    value,
    keys,
    values,
    slots,
    tokens,
    key_head,
    key_token,
    value_head,
    value_token,
    pool_head,
    pool_slot,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write a layer's new keys and values that have a slot into the pool. Programs: (some tokens, key head)."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, WIDTH)
    is_there = (token < tokens)[:, None] & (d < DIM)[None, :]
    slot = tl.load(slots + token, mask=token < tokens, other=-1).to(tl.int64)
    is_there = is_there & (slot >= 0)[:, None]
    token = token.to(tl.int64)
    place = head * pool_head + slot[:, None] * pool_slot + d[None, :]
    new = tl.load(key + head * key_head + token[:, None] * key_token + d[None, :], mask=is_there)
    tl.store(keys + place, new, mask=is_there)
    new = tl.load(value + head * value_head + token[:, None] * value_token + d[None, :], mask=is_there)
    tl.store(values + place, new, mask=is_there)


@triton.jit
def product(left, right, acc, UPCAST: tl.constexpr):
    """Multiply matrices and add `acc`, in fp32; `UPCAST` converts both to fp32 first."""
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc=acc, input_precision="ieee")


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    tiles,
    pairs,
    cos,
    sin,
    outs,
    sums,
    query_token,
    query_head,
    pool_head,
    pool_slot,
    heads,
    scale,
    softcap,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TURNED_FROM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    HALVES: tl.constexpr,
    CAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend from a tile's rows to the slots of its chunk that they see. Programs: (tile, key head)."""
    tile = tiles + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    start = tl.load(tile).to(tl.int64)
    begin, end = tl.load(tile + 1), tl.load(tile + 2)
    first_row, count = tl.load(tile + 3), tl.load(tile + 4)

    m = tl.arange(0, ROWS)
    is_row = m < count
    pair = (first_row + m) // GROUP
    head = kv_head * GROUP + (first_row + m) % GROUP
    token = tl.load(pairs + pair * 4, mask=is_row, other=0).to(tl.int64)
    low = tl.load(pairs + pair * 4 + 2, mask=is_row, other=0)
    high = tl.load(pairs + pair * 4 + 3, mask=is_row, other=0)

    d = tl.arange(0, WIDTH)
    is_dim = d < DIM
    own = query + token[:, None] * query_token + head[:, None] * query_head
    turn = tl.load(pairs + pair * 4 + 1, mask=is_row, other=0)
    h = tl.arange(0, WIDTH // 2)
    if HALVES:
        # All dimensions rotate, the first half with the second: two products of half the length, contiguous loads.
        q = tl.load(own + h[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
        partner = tl.load(own + HALF + h[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
        c = tl.load(cos + turn[:, None] * HALF + h[None, :], mask=is_row[:, None], other=1.0)
        s = tl.load(sin + turn[:, None] * HALF + h[None, :], mask=is_row[:, None], other=0.0)
        second = (partner * c + q * s).to(keys.dtype.element_ty)
        q = (q * c - partner * s).to(keys.dtype.element_ty)
    else:
        q = tl.load(own + d[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
        if HALF > 0:
            # Each dimension that rotates is loaded with its mate: x cos - y sin for the first of a pair, y cos + x sin
            # for the second.
            r = d - TURNED_FROM
            turns = (r >= 0) & (r < 2 * HALF)
            if NEIGHBOURS:
                angle, is_first = r // 2, r % 2 == 0
                mate = tl.where(is_first, d + 1, d - 1)
            else:
                angle, is_first = r % HALF, r < HALF
                mate = tl.where(is_first, d + HALF, d - HALF)
            angle, mate = tl.where(turns, angle, 0), tl.where(turns, mate, 0)
            is_turned = is_row[:, None] & turns[None, :]
            partner = tl.load(own + mate[None, :], mask=is_turned, other=0.0).to(tl.float32)
            c = tl.load(cos + turn[:, None] * HALF + angle[None, :], mask=is_turned, other=1.0)
            s = tl.load(sin + turn[:, None] * HALF + angle[None, :], mask=is_turned, other=0.0)
            q = (q.to(tl.float32) * c + tl.where(is_first[None, :], -partner, partner) * s).to(keys.dtype.element_ty)

    n = tl.arange(0, SLOTS)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    out = tl.full((ROWS, WIDTH), 0.0, tl.float32)
    pool = kv_head.to(tl.int64) * pool_head + start * pool_slot
    # Blocks are aligned to the chunk, not to the tile, so that a row's sums do not depend on what others see.
    for block in range(begin // SLOTS * SLOTS, end, SLOTS):
        slot = block + n
        is_slot = (slot >= begin) & (slot < end)
        place = pool + slot[:, None] * pool_slot + d[None, :]
        is_there = is_slot[:, None] & is_dim[None, :]
        if HALVES:
            half = keys + pool + slot[:, None] * pool_slot + h[None, :]
            k = tl.load(half, mask=is_slot[:, None], other=0.0)
            behind = tl.load(half + HALF, mask=is_slot[:, None], other=0.0)
            score = product(q, tl.trans(k), None, UPCAST)
            score = product(second, tl.trans(behind), score, UPCAST)
        else:
            k = tl.load(keys + place, mask=is_there, other=0.0)
            score = product(q, tl.trans(k), None, UPCAST)
        v = tl.load(values + place, mask=is_there, other=0.0)
        score = score * scale
        if CAPPED:
            # tanh from exponentials that are at most 1, so that nothing overflows.
            e = tl.exp2(tl.abs(score) * (-2.0 * LOG2_E) / softcap)
            score = softcap * tl.where(score < 0, e - 1.0, 1.0 - e) / (1.0 + e)
        is_seen = (slot[None, :] >= low[:, None]) & (slot[None, :] < high[:, None])
        score = tl.where(is_seen, score * LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(highest - base)
        total = total * faded + tl.sum(weight, 1)
        added = product(weight.to(v.dtype), v, None, UPCAST)
        out = out * faded[:, None] + added
        highest = higher
    total = tl.where(is_row, total, 1.0)
    row = pair.to(tl.int64) * heads + head
    is_there = is_row[:, None] & is_dim[None, :]
    tl.store(outs + row[:, None] * DIM + d[None, :], out / total[:, None], mask=is_there)
    tl.store(sums + row, highest + tl.log2(total), mask=is_row)


@triton.jit
def merge_kernel(
    outs,
    sums,
    first_part,
    parts,
    sinks,
    joined,
    heads,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the partial results of a token's pairs, in the order of its list. Programs: (token, some heads).

    A token without pairs gets zeros.
    """
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    begin, end = tl.load(first_part + token), tl.load(first_part + token + 1)
    is_head = head < heads
    i = tl.arange(0, TOGETHER)
    d = tl.arange(0, WIDTH)
    if SINKS:
        highest = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full((HEADS,), 1.0, tl.float32)
    else:
        highest = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.full((HEADS,), 0.0, tl.float32)
    out = tl.full((HEADS, WIDTH), 0.0, tl.float32)
    for at in range(begin, end, TOGETHER):
        is_part = at + i < end
        part = tl.load(parts + at + i, mask=is_part, other=0).to(tl.int64)
        row = part[:, None] * heads + head[None, :]
        is_there = is_part[:, None] & is_head[None, :]
        part_sum = tl.load(sums + row, mask=is_there, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(part_sum, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(part_sum - base[None, :])
        faded = tl.exp2(highest - base)
        inside = is_there[:, :, None] & (d < DIM)[None, None, :]
        part_out = tl.load(outs + row[:, :, None] * DIM + d[None, None, :], mask=inside, other=0.0)
        out = out * faded[:, None] + tl.sum(part_out * weight[:, :, None], 0)
        total = total * faded + tl.sum(weight, 0)
        highest = higher
    total = tl.where(is_head & (total > 0.0), total, 1.0)
    place = (token.to(tl.int64) * heads + head[:, None]) * DIM + d[None, :]
    tl.store(joined + place, out / total[:, None], mask=is_head[:, None] & (d < DIM)[None, :])
