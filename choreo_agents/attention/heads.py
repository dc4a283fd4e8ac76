"""The shape of a model's attention heads, by which kernels are chosen."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """Number and size of the heads, the same in all layers."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.kv_heads


USUAL_HEADS = HeadShape(8, 2, 64)
