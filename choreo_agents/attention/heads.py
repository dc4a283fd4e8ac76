"""The shape of a model's heads, as kernels are chosen by it."""

from __future__ import annotations

from typing import NamedTuple


class HeadShape(NamedTuple):
    """Of all layers."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Heads that share a key head."""
        return self.heads // self.kv_heads


USUAL_HEADS = HeadShape(8, 2, 64)
