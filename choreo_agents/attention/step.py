"""One step's attention over a pool: write the new keys and values, then attend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.attention.backends.base import AttentionBackend, PreparedAttention
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.kv.pool import KVPool


class Attention(Protocol):
    """How the attention layers of one forward pass attend."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with the pass's tokens.

        Args:
            layer: Which of the model's.
            query: [tokens, heads, head_dim]; `key` and `value` [kv_heads, tokens, head_dim], all as the model rotated
                them.
            scale: Factor on the scores.
            sinks: [heads], attention sinks: scores of nothing.

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class StepAttention:
    """Handed through the model's forward to its attention layers; lives for one step.

    Args:
        layout: Who attends to what.
        pool: Where keys and values live.
        backend: Attends.
        kinds: How each of the model's layers attends.
        wait: Returns when all that the step reads is there in a layer.
    """

    def __init__(
        self,
        layout: Layout,
        pool: KVPool,
        backend: AttentionBackend,
        kinds: Sequence[AttentionKind],
        wait: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.pool = pool
        self.wait = wait
        self.kinds = kinds
        self.slots = torch.tensor(layout.write_slots, device=pool.keys[0].device)
        self.prepared: dict[AttentionKind, PreparedAttention] = {
            kind: backend.prepare(layout, kind) for kind in dict.fromkeys(kinds)
        }

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Store a layer's new keys and values ([kv_heads, tokens, head_dim]), return [tokens, heads, head_dim].

        `query` is [tokens, heads, head_dim]; keys and queries come rotated to their own positions.
        """
        self.wait(layer)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        keys.index_copy_(1, self.slots, key)
        values.index_copy_(1, self.slots, value)
        return self.prepared[self.kinds[layer]].attend(query, keys, values, scale, sinks)

    def kv_bytes_read(self, readers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """KV memory that the step reads, and what it would read if no two of its rows shared a segment's.

        Args:
            readers: Who each of its tokens is of: what is read is told reader by reader.
        """
        geometry = self.pool.geometry
        each = geometry.bytes_per_token // geometry.layers
        layers = Counter(self.kinds)
        found: dict[str, tuple[int, int]] = {}
        for kind, prepared in self.prepared.items():
            for reader, (shared, alone) in prepared.layout.slots_read_by(readers).items():
                before = found.get(reader, (0, 0))
                found[reader] = (before[0] + each * layers[kind] * shared, before[1] + each * layers[kind] * alone)
        return found
