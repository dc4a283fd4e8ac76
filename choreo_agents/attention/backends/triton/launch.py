"""Starts the kernels, with constants that are compiled in and the arguments of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

from choreo_agents.attention.backends.triton.kernels import attend_kernel, merge_kernel, store_kernel
from choreo_agents.attention.backends.triton.plan import StepPlan
from choreo_agents.attention.backends.triton.tiles import (
    PARTS_TOGETHER,
    STORED_TOGETHER,
    Tile,
    heads_together,
    padded,
    tiles,
)
from choreo_agents.attention.kind import AttentionKind, HeadShape

Constants = Mapping[str, Any]
MERGE_WARPS = 1


def is_interpreted() -> bool:
    """Return whether the kernels are interpreted, as under `TRITON_INTERPRET=1`."""
    return not isinstance(attend_kernel, JITFunction)


def store_constants(shape: HeadShape) -> Constants:
    return {"DIM": shape.head_dim, "WIDTH": padded(shape.head_dim), "TOKENS": STORED_TOGETHER}


def attend_constants(kind: AttentionKind, shape: HeadShape, tile: Tile, *, upcast: bool) -> Constants:
    """Return the constants of `attend_kernel`; `upcast` multiplies in fp32, the only products of the interpreter."""
    rotation = kind.rotation
    return {
        "GROUP": shape.group,
        "DIM": shape.head_dim,
        "WIDTH": padded(shape.head_dim),
        "HALF": 0 if rotation is None else rotation.dimensions // 2,
        "TURNED_FROM": 0 if rotation is None else rotation.first,
        "NEIGHBOURS": rotation is not None and rotation.pairing == "neighbours",
        "HALVES": _turns_in_halves(kind, shape),
        "CAPPED": kind.softcap is not None,
        "ROWS": tile.rows,
        "SLOTS": tile.slots,
        "UPCAST": upcast,
    }


def _turns_in_halves(kind: AttentionKind, shape: HeadShape) -> bool:
    """Return whether all dimensions rotate in halves, and a half is long enough for a matrix product."""
    rotation = kind.rotation
    if rotation is None or rotation.pairing != "halves" or rotation.first:
        return False
    return rotation.dimensions == shape.head_dim == padded(shape.head_dim) >= 32


def merge_constants(shape: HeadShape, *, sinks: bool) -> Constants:
    return {
        "DIM": shape.head_dim,
        "WIDTH": padded(shape.head_dim),
        "HEADS": heads_together(shape),
        "TOGETHER": PARTS_TOGETHER,
        "SINKS": sinks,
    }


def store(plan: StepPlan, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write [kv_heads, tokens, head_dim] new keys and values into a layer's pool: one launch."""
    kv_heads, tokens, dim = key.shape
    constants = store_constants(HeadShape(kv_heads, kv_heads, dim))
    key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (key, value))
    store_kernel[(-(-tokens // STORED_TOGETHER), kv_heads)](
        key,
        value,
        keys,
        values,
        plan.tables["slots"],
        tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:2],
        **constants,
    )


def attend(
    plan: StepPlan,
    kind: AttentionKind,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Compute the attention of a layer in two or three launches, see `PreparedAttention`."""
    shape = plan.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    outs, sums = plan.scratch(query)
    counts = plan.sizes_of(kind)
    turned = kind.rotation is not None
    cos, sin = (plan.table(kind, name) if turned else outs for name in ("cos", "sin"))
    sizes = tiles(shape, query.dtype)
    upcast = is_interpreted()
    for name, count, size in (("few", counts.few, sizes[0]), ("many", counts.many, sizes[1])):
        if count:
            attend_kernel[(count, shape.kv_heads)](
                query,
                keys,
                values,
                plan.table(kind, name),
                plan.table(kind, "pair"),
                cos,
                sin,
                outs,
                sums,
                *query.stride()[:2],
                *keys.stride()[:2],
                shape.heads,
                scale,
                1.0 if kind.softcap is None else kind.softcap,
                **attend_constants(kind, shape, size, upcast=upcast),
                num_warps=size.warps,
                num_stages=size.stages,
            )
    joined = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    merge_kernel[(plan.sizes.tokens, -(-shape.heads // heads_together(shape)))](
        outs,
        sums,
        plan.table(kind, "first"),
        plan.table(kind, "part"),
        sums if sinks is None else sinks,
        joined,
        shape.heads,
        **merge_constants(shape, sinks=sinks is not None),
        num_warps=MERGE_WARPS,
    )
    return joined
