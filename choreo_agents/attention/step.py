"""Attention of one step: write the new keys and values into the pool, then attend; and the contract of backends."""

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
    """Attention as the layers of a model call it in one forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from the tokens of the pass.

        Args:
            layer: Index of the layer.
            query: [tokens, heads, head_dim]; `key` and `value` [kv_heads, tokens, head_dim], all rotated by the model.
            scale: Factor on the scores.
            sinks: [heads], attention sinks: scores that belong to no key.

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class StepAttention:
    """Attention of one step, passed through the model's forward to its attention layers.

    Args:
        layout: Which tokens read which slots.
        pool: Keys and values.
        backend: Computes the attention.
        kinds: The kind of each layer of the model.
        wait: Returns when all KV that the step reads has been copied into a layer of the pool.
        prepared: The layout prepared for each kind of layer; None: `backend` prepares it.
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
        """Decode steps since the layout was prepared."""
        self._read: dict[str, tuple[int, int]] = {}
        """Bytes that the first of these steps read, shared and unshared, by reader."""
        if prepared is None:
            once, together = tuple(dict.fromkeys(kinds)), getattr(backend, "prepare_step", None)
            prepared = together(layout, once) if together else {kind: backend.prepare(layout, kind) for kind in once}
        self.prepared: Mapping[AttentionKind, PreparedAttention] = prepared
        self._stores = all(hasattr(prepared, "store") for prepared in self.prepared.values())
        if not self._stores:
            slots = numpy.array(layout.write_slots, dtype=numpy.int64)
            self.slots = SentTables({"slots": slots}, pool.keys[0].device)["slots"]
            """[tokens], the slot of each new key and value; only for a backend that does not store them itself."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Store a layer's new keys and values [kv_heads, tokens, head_dim] and return [tokens, heads, head_dim].

        `query` is [tokens, heads, head_dim]; keys and queries are rotated to their own positions.
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
        """Advance to the next decode step of the same rows; return False if the layout must be prepared anew.

        After False the object is unusable: some kinds may have advanced already.
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
        """Return the KV bytes that the step reads, by reader, and the bytes if its rows shared no segment.

        Args:
            readers: The reader to whom each token of the step is counted.
        """
        geometry, rows = self.pool.geometry, Counter(readers)
        if not self._further:
            layers, self._read = Counter(self.kinds), {}
            for kind, prepared in self.prepared.items():
                nbytes = geometry.bytes_per_token // geometry.layers * layers[kind]
                for reader, (shared, alone) in prepared.layout.slots_read_by(readers).items():
                    before = self._read.get(reader, (0, 0))
                    self._read[reader] = (before[0] + nbytes * shared, before[1] + nbytes * alone)
        more = geometry.bytes_per_token * self._further  # each token reads one more slot of its own per step
        return {
            reader: (shared + more * rows[reader], alone + more * rows[reader])
            for reader, (shared, alone) in self._read.items()
        }


class PreparedAttention(Protocol):
    """A step's attention for layers of one kind, its indices and rotations already on the device.

    Optional `follow() -> bool` advances it to the next step, in which each token's own run (`Layout.own`) is a slot
    longer; it returns False if that is impossible. Without `follow`, every step is prepared anew.

    Optional `store(heads, key, value, keys, values)` writes a layer's new keys and values into the pool, for a model
    with that many heads. It is used only if all kinds of a step have it; otherwise `StepAttention` writes them.
    """

    layout: Layout
    """The step's layout, without the slots that a window hides from every token."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Compute the attention of one layer.

        Args:
            query: [tokens, heads, head_dim], rotated to each token's own position.
            keys: [kv_heads, slots, head_dim], the layer's pool, with this step's keys already written.
            values: Like `keys`.
            scale: Factor on the scores.
            sinks: [heads], attention sinks: a score that takes its share of each softmax and adds nothing (gpt-oss).

        Returns:
            [tokens, heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention: prepares a step's layout for layers of one kind.

    Optional `prepare_step(layout, kinds)` prepares all kinds of a step at once, as a mapping, so that they share work.

    A backend may also pad steps to recurring sizes, so that CUDA graphs can replay the same launches over the same
    memory: `plan_step(layout, kinds, shape)` plans a step, whose `sizes` can be `rounded()`; `tables(planned, sizes)`
    is memory for all steps of these sizes, into which `be(planned)` loads another one; `prepare_planned(planned,
    tables)` returns what `prepare_step` does, for a pass of `sizes.tokens` tokens. Tokens of padding see nothing and
    are written nowhere.
    """

    def prepare(self, layout: Layout, kind: AttentionKind) -> PreparedAttention: ...
