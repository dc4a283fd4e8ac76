"""The contract of an attention backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout


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
