"""Attention parameters by which the layers of a model differ."""

from __future__ import annotations

from dataclasses import dataclass

from choreo_agents.attention.rope import PureRotation


@dataclass(frozen=True)
class AttentionKind:
    """Attention parameters of a layer. Layers of one kind share what is prepared for a step."""

    rotation: PureRotation | None = None
    """Rotation that gives queries and keys their positions; None for a layer without positions."""
    window: int | None = None
    """Positions that a token sees, including its own: a key at view position v is seen from p if p - v < window."""
    softcap: float | None = None
    """Bound on scores: s becomes softcap * tanh(s / softcap)."""
