"""Tile sizes: the share of a step that one program of a kernel computes.

They depend on the model's heads, their dtype, and the number of a row's tokens in the step, and never on other rows. A
row's result is therefore the same, bit by bit, whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from choreo_agents.attention.kind import HeadShape

FEW_QUERIES = 128
"""Upper bound on the tokens of a span that count as few, as in a decode; more count as many."""
FEW_SLOTS, MANY_SLOTS = 512, 4096
"""Slots of a chunk. Small chunks share a decode's long runs among many programs; a prefill has enough programs, and
larger chunks leave fewer parts to write and merge."""
PARTS_TOGETHER = 4
"""Parts of a token that the merge loads at once, ..."""
_MERGED_NUMBERS = 256
"""... in as many heads as have this many dimensions in all."""
STORED_TOGETHER = 16
"""Tokens that one program writes into the pool."""


@dataclass(frozen=True)
class Tile:
    """Share of one program: rows (a token's query in one head) times slots, block by block."""

    chunk: int
    """Upper bound on the slots that the program reads."""
    rows: int
    slots: int
    """Slots of a block."""
    warps: int
    stages: int


def padded(dim: int) -> int:
    """Return a head's dimensions padded for the kernels: a power of two, at least 16 for matrix products."""
    return max(16, 1 << (dim - 1).bit_length())


def heads_together(shape: HeadShape) -> int:
    """Return the number of heads that one program of the merge joins: a power of two."""
    return min(max(1, _MERGED_NUMBERS // padded(shape.head_dim)), 1 << (shape.heads - 1).bit_length())


def tiles(shape: HeadShape, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Return the tiles for rows with few queries, and for rows with many.

    Rows, slots, warps and stages for heads of up to 128 dimensions in half precision are measured on an H100. All are
    as large as registers and shared memory allow without spilling, which `make test-triton` checks in the assembly.
    """
    width = padded(shape.head_dim)
    if dtype == torch.float32:
        # Products in full precision do not run on tensor cores: registers bound them.
        sizes = (32, 32, 4, 1) if width <= 64 else (16, 32, 8, 1)
    elif width <= 128:
        # Masks of padded dimensions take registers.
        sizes = (64, 64, 4 if shape.head_dim == width else 8, 3)
    else:
        sizes = (64, 32, 8, 2)
    return Tile(FEW_SLOTS, *sizes), Tile(MANY_SLOTS, *sizes)
