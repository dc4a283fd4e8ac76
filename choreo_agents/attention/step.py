"""One step's attention over a pool: write the new keys and values, then attend; and the contract of who attends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy
from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.packing import SentTables
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
        prepared: By a backend for all kinds of layers; None: it is asked to.
    """

    def __init__(
        self,
        layout: Layout,
        pool: KVPool,
        backend: AttentionBackend,
        kinds: Sequence[AttentionKind],
        wait: Callable[[int], None] = lambda _: None,
        prepared: Mapping[AttentionKind, PreparedAttention] | None = None,
    ) -> None:
        self.pool = pool
        self.wait = wait
        self.kinds = kinds
        self._further = 0
        """Decode steps since it was prepared."""
        self._read: dict[str, tuple[int, int]] = {}
        """What the first of them read."""
        if prepared is None:
            once, together = tuple(dict.fromkeys(kinds)), getattr(backend, "prepare_step", None)
            prepared = together(layout, once) if together else {kind: backend.prepare(layout, kind) for kind in once}
        self.prepared: Mapping[AttentionKind, PreparedAttention] = prepared
        self._stores = all(hasattr(prepared, "store") for prepared in self.prepared.values())
        if not self._stores:
            slots = numpy.array(layout.write_slots, dtype=numpy.int64)
            self.slots = SentTables({"slots": slots}, pool.keys[0].device)["slots"]
            """Where each token's key and value go, if not the backend stores them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Store a layer's new keys and values ([kv_heads, tokens, head_dim]), return [tokens, heads, head_dim].

        `query` is [tokens, heads, head_dim]; keys and queries come rotated to their own positions.
        """
        self.wait(layer)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        prepared: Any = self.prepared[self.kinds[layer]]
        if self._stores:
            prepared.store(query.shape[1], key, value, keys, values)
        else:
            keys.index_copy_(1, self.slots, key)
            values.index_copy_(1, self.slots, value)
        attended: Tensor = prepared.attend(query, keys, values, scale, sinks)
        return attended

    def follow(self) -> bool:
        """Be the attention of the next decode step, of the same rows; False if it has to be prepared anew.

        Whoever is told so prepares it anew: some of it may have gone on.
        """
        for prepared in self.prepared.values():
            further = getattr(prepared, "follow", None)
            if further is None or not further():
                return False
        if not self._stores:
            self.slots.add_(1)
        self._further += 1
        return True

    def kv_bytes_read(self, readers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """KV memory that the step reads, and what it would read if no two of its rows shared a segment's.

        Args:
            readers: Who each of its tokens is of: what is read is told reader by reader.
        """
        if self._further:
            return self._read_further(readers)
        geometry = self.pool.geometry
        each = geometry.bytes_per_token // geometry.layers
        layers = Counter(self.kinds)
        found: dict[str, tuple[int, int]] = {}
        for kind, prepared in self.prepared.items():
            for reader, (shared, alone) in prepared.layout.slots_read_by(readers).items():
                before = found.get(reader, (0, 0))
                found[reader] = (before[0] + each * layers[kind] * shared, before[1] + each * layers[kind] * alone)
        self._read = found
        return found

    def _read_further(self, readers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """The same some steps later: each token reads as many slots more, all its own."""
        each = self.pool.geometry.bytes_per_token * self._further
        rows = Counter(readers)
        return {
            reader: (shared + each * rows[reader], alone + each * rows[reader])
            for reader, (shared, alone) in self._read.items()
        }


class PreparedAttention(Protocol):
    """One step's attention in the layers of one kind, its indices and rotations already on the device.

    It may have `follow() -> bool`: to be that of the next step, in which each token's own run (`Layout.own`) is a slot
    longer; False if it cannot. What has none is prepared anew for each step.

    It may have `store(heads, key, value, keys, values)`: to write a layer's new keys and values into the pool, for a
    model with so many heads; if all of a step's have it, nobody else does.
    """

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
    """Makes a layout ready for the layers of one kind.

    It may have `prepare_step(layout, kinds)`: to make it ready for all kinds of a step, as a mapping, where they share.

    It may have steps whose sizes recur, so that they take the same launches over the same memory:
    `plan_step(layout, kinds, shape)` plans one, whose `sizes` can be `rounded()`; `tables(planned, sizes)` is memory
    for all steps of these sizes, which may `be(planned)` another one; `prepare_planned(planned, tables)` is what
    `prepare_step` gives, for a pass of `sizes.tokens` tokens, of which those behind the step's own see nothing and are
    written nowhere.
    """

    def prepare(self, layout: Layout, kind: AttentionKind) -> PreparedAttention: ...
