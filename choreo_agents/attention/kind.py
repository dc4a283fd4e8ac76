"""What tells the attention of one layer from that of another."""

from __future__ import annotations

from dataclasses import dataclass

from choreo_agents.attention.rope import PureRotation


@dataclass(frozen=True)
class AttentionKind:
    """How a layer attends. Layers of one kind share what is prepared for a step."""

    rotation: PureRotation | None = None
    """How its queries and keys carry positions; None for a layer without positions."""
    window: int | None = None
    """Positions that a token sees, its own among them: a key at view position v is seen from p if p - v < window."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
