"""Trial of a GPU kernel before it is used: its results are compared with plain products in doubles.

Outputs over many slots are small, so that an absolute bound would let much through: errors are relative to each
query's own output. That finds a kernel that omits a single slot of the longest runs.
"""

from __future__ import annotations

from itertools import cycle

import torch
from torch import Tensor

from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.rope import PureRotation
from choreo_agents.attention.step import AttentionBackend

RUNS = (1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025)
"""Lengths of runs, in slots: around the sizes in which kernels cut them."""
RELATIVE_ERROR = 1e-2
"""Bound on the error of a query's output in one head, in half precision."""
SUM_ERROR = 1e-3
"""Bound on the error of a log-sum-exp of fp32 scores, in nats."""
ROUNDED_ERROR = 5e-2
"""Bound for an output over thousands of slots, whose weights may be rounded to half precision."""
WIDE_ERROR = 1e-5
"""Bound on the error of a query's output in one head, in fp32."""
_LINE = 120
"""Upper bound on the characters of a failure's message."""


def draw_heads(shape: HeadShape, queries: int, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries [queries, heads, dim], keys and values [kv_heads, slots, dim] of a fixed seed, on the host."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((queries, heads, dim), (kv_heads, slots, dim), (kv_heads, slots, dim))
    query, keys, values = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return query, keys, values


def worst_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a query's output in one head; both are [queries, heads, dim]."""
    actual, expected = actual.double(), expected.double().to(actual.device)
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.nan_to_num(nan=torch.inf).max())


def find_fault(backend: AttentionBackend, shape: HeadShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Run a backend on a layout that shares, moves and cuts, in layers of every kind; return the first fault, or None.

    New keys and values are written as the backend writes them. Some reads have few rows, others many, as in a prefill.
    """
    angles = PureRotation(1.0 / 10_000 ** (torch.arange(0, shape.head_dim // 2 * 2, 2) / shape.head_dim))
    layout = _layout()
    slots = max(read.start + read.length for read in layout.reads)
    query, keys, values = draw_heads(shape, len(layout.positions), slots, dtype)
    scale, written = shape.head_dim**-0.5, torch.tensor(layout.write_slots)
    for label, kind, has_sinks, half in (
        ("shared and moved", AttentionKind(angles), False, RELATIVE_ERROR),
        ("capped, beside sinks", AttentionKind(angles, softcap=20.0), True, ROUNDED_ERROR),
        ("seen through a window", AttentionKind(angles, window=700), False, ROUNDED_ERROR),
    ):
        bound = WIDE_ERROR if dtype == torch.float32 else half
        sinks = torch.linspace(-1, 1, shape.heads).to(dtype) if has_sinks else None
        pool = keys.index_fill(1, written, 0).to(device), values.index_fill(1, written, 0).to(device)
        try:
            prepared = backend.prepare(layout, kind)
            store = getattr(prepared, "store", None)
            new = [part[:, written].to(device) for part in (keys, values)]
            if store is not None:
                store(shape.heads, *new, *pool)
            else:
                for part, own in zip(pool, new, strict=True):
                    part.index_copy_(1, written.to(device), own)
            actual = prepared.attend(query.to(device), *pool, scale, None if sinks is None else sinks.to(device))
        except torch.OutOfMemoryError:
            raise  # no fault of the kernel
        except Exception as error:  # unavailable kernels raise anything
            return error_line(error)
        expected = ReferenceBackend().prepare(layout, kind).attend(query.double(), keys, values, scale, sinks)
        off = worst_error(actual, expected)
        if not off <= bound:
            return f"its output for messages that are {label} is off by {off:.1e}"
    return None


def _layout() -> Layout:
    """Return a layout of seven tokens that decode or end prompts, and forty of a prefill, over runs that both read."""
    reads = [
        Read(9, 4200, 0, (QuerySpan(0, 4, 0), QuerySpan(6, 1, 130, 1), QuerySpan(7, 40, 60))),
        Read(3, 5, 7, (QuerySpan(4, 2, 4160), QuerySpan(6, 1, 4150))),
        Read(4211, 4, 4200, (QuerySpan(0, 4, 0, 1),), causal=True),
        Read(4231, 2, 4210, (QuerySpan(4, 2, 0, 1),), causal=True),
        Read(4241, 1, 4400, (QuerySpan(6, 1, 0, 2),)),
        Read(4251, 40, 4300, (QuerySpan(7, 40, 0, 1),), causal=True),
    ]
    positions = (*range(4200, 4204), 4210, 4211, 4400, *range(4300, 4340))
    slots = (*range(4211, 4215), 4231, 4232, 4241, *range(4251, 4291))
    return Layout(positions, slots, tuple(reads))


def runs_apart(*, causal: bool) -> list[Read]:
    """Return a read of each length in `RUNS`, from odd slots on: causal, or with a few readers."""
    reads: list[Read] = []
    start = first = 0
    for length, few in zip(RUNS, cycle((1, 5, 2)), strict=False):
        start += 3 - start % 2  # the next odd slot but one
        count = length if causal else few
        reads.append(Read(start, length, 0, (QuerySpan(first, count, 0),), causal))
        start, first = start + length, first + count
    return reads


def error_line(error: Exception) -> str:
    """Return an error as one short line."""
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line if len(line) <= _LINE else line[:_LINE] + ' ...'}"
