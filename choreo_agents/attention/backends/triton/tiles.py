"""How much of a step one program takes.

It follows from the model's heads and their dtype, and from how many tokens a row has in the step: from nothing that
other rows bring along. What a row is given is then the same, bit by bit, in any company.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from choreo_agents.attention.heads import HeadShape

FEW_QUERIES = 128
"""Tokens of a row that read a run together: up to so many count as few, as in a decode; above, as many."""
FEW_SLOTS, MANY_SLOTS = 512, 4096
"""Slots of a chunk. A decode's long runs are shared by many programs; a prefill has enough of them, and what each
leaves for the merge is written per token and chunk."""
PARTS_TOGETHER = 4
"""Parts of a token that the merge looks at together, ..."""
_MERGED_NUMBERS = 256
"""... in as many heads as have so many dimensions."""
STORED_TOGETHER = 16
"""Tokens that one program writes into the pool."""


@dataclass(frozen=True)
class Tile:
    """A program's share: rows (a token's query in one head) times slots, block by block."""

    chunk: int
    """Slots of a chunk at most: of all that it reads."""
    rows: int
    slots: int
    """Of a block."""
    warps: int
    stages: int


def padded(dim: int) -> int:
    """A head's dimensions as the kernels see them: a power of two, and what a matrix product takes at least."""
    return max(16, 1 << (dim - 1).bit_length())


def heads_together(shape: HeadShape) -> int:
    """Heads that one program of the merge joins: a power of two."""
    return min(max(1, _MERGED_NUMBERS // padded(shape.head_dim)), 1 << (shape.heads - 1).bit_length())


def tiles(shape: HeadShape, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """For rows with few queries, and for those with many.

    Rows, slots, warps and stages for heads of up to 128 dimensions in half precision are as measured on an H100. All
    are as large as registers and shared memory hold without spilling: `make test-triton` has the assembler say so.
    """
    width = padded(shape.head_dim)
    if dtype == torch.float32:
        # Products in full precision are no tensor core's: what bounds them is registers.
        sizes = (32, 32, 4, 1) if width <= 64 else (16, 32, 8, 1)
    elif width <= 128:
        # Dimensions that are masked take registers.
        sizes = (64, 64, 4 if shape.head_dim == width else 8, 3)
    else:
        sizes = (64, 32, 8, 2)
    return Tile(FEW_SLOTS, *sizes), Tile(MANY_SLOTS, *sizes)
