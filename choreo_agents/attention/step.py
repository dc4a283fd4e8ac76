"""One step's attention over a pool: write the new keys and values, then attend."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.attention.base import AttentionBackend
from choreo_agents.attention.layout import Layout
from choreo_agents.kv.pool import KVPool


class StepAttention:
    """Handed through the model's forward to its attention layers; lives for one step."""

    def __init__(self, layout: Layout, pool: KVPool, backend: AttentionBackend) -> None:
        self.pool = pool
        self.slots = torch.tensor(layout.write_slots, device=pool.keys[0].device)
        self.prepared = backend.prepare(layout)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store a layer's new keys and values ([kv_heads, tokens, head_dim]), return [tokens, heads, head_dim].

        `query` is [tokens, heads, head_dim]; keys and queries come rotated to their own positions.
        """
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(1, self.slots, key)
        values.index_copy_(1, self.slots, value)
        return self.prepared.attend(query, keys, values, scale)
