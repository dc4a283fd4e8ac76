"""The shape of a model's attention heads, and the parameters in which its layers differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from choreo_agents.attention.rope import PureRotation


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


@dataclass(frozen=True)
class AttentionKind:
    """Attention parameters of a layer. Layers of one kind share what is prepared for a step."""

    rotation: PureRotation | None = None
    """Rotation that gives queries and keys their positions; None for a layer without positions."""
    window: int | None = None
    """Positions that a token sees, including its own: a key at view position v is seen from p if p - v < window."""
    softcap: float | None = None
    """Bound on scores: s becomes softcap * tanh(s / softcap)."""
