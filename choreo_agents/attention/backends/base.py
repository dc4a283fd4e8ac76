"""The contract of an attention backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout


class PreparedAttention(Protocol):
    """One step's attention in the layers of one kind, its indices and rotations already on the device."""

    layout: Layout
    """What it reads: the step's layout, less what a window lets nobody see."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attention of one layer.

        Args:
            query: [tokens, heads, head_dim], rotated to each token's own position.
            keys: [kv_heads, slots, head_dim], the layer's pool, this step's keys already written.
            values: Like `keys`.
            scale: Factor on the scores.
            sinks: [heads], attention sinks: a score that takes its share of each softmax and adds nothing (gpt-oss).

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes a layout ready for the layers of one kind."""

    def prepare(self, layout: Layout, kind: AttentionKind) -> PreparedAttention: ...
