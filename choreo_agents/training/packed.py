"""Packs whole workflows into one row of tokens, with differentiable attention in which each message attends to its
view, at the view's positions.

row     | trace 0: message 0 | message 1 | ... | trace 1: message 0 | ... |
bank    | the same rows                                                   | mapped messages | moved messages |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.training.trace import Trace, TraceMessage


@dataclass
class PackedTraces:
    """Several traces in one row: every message's tokens once; no trace sees another.

    The bank has the keys and values that messages see: those of the row, of mapped messages, and of messages that are
    seen at other positions than those at which they were encoded, once for each such position.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position at which each token was encoded."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens of each message of the row."""
    mapped: list[int] = field(default_factory=list)
    """Row that each token of a mapped message is computed from."""
    moved: list[int] = field(default_factory=list)
    """Row of the bank that each moved token is rotated from."""
    shifts: list[int] = field(default_factory=list)
    """Number of positions by which each moved token is seen further on."""
    seen: list[int] = field(default_factory=list)
    """Rows of the bank that the first message sees in order, its own tokens last; then the second's; and so on."""
    shown: list[int] = field(default_factory=list)
    """Position of each in its message's view."""
    lengths: list[int] = field(default_factory=list)
    """How many of them belong to each message."""
    predictors: list[int] = field(default_factory=list)
    """Rows whose logits predict the learnt tokens: the row before each."""
    targets: list[int] = field(default_factory=list)
    """The learnt tokens."""
    owners: list[int] = field(default_factory=list)
    """Index of each learnt token's trace."""
    rows_of_adapters: dict[str, list[int]] = field(default_factory=dict)
    """Rows that each adapter encodes."""

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> PackedTraces:
        """Pack traces in their order."""
        packed = cls()
        encoded = [(number, m) for number, trace in enumerate(traces) for m in trace.messages if not m.mapped]
        mapped = [(number, m) for number, trace in enumerate(traces) for m in trace.messages if m.mapped]
        # First row of the bank by trace, message and the position at which the message is seen.
        firsts: dict[tuple[int, str, int], int] = {}
        for number, message in encoded:
            firsts[number, message.name, message.position] = len(packed.tokens)
            packed._encode(number, message)
        for number, message in mapped:
            firsts[number, message.name, message.position] = len(packed.tokens) + len(packed.mapped)
            source = firsts[number, message.parents[0], message.position]
            packed.mapped.extend(range(source, source + len(message.tokens)))
        for number, message in encoded:
            packed._view(number, message, traces[number], firsts)
        return packed

    def _encode(self, number: int, message: TraceMessage) -> None:
        first, count = len(self.tokens), len(message.tokens)
        self.counts.append(count)
        self.tokens.extend(message.tokens)
        self.positions.extend(range(message.position, message.position + count))
        if message.adapter is not None:
            self.rows_of_adapters.setdefault(message.adapter, []).extend(range(first, first + count))
        if message.learn is not None:
            start, end = message.learn
            self.predictors.extend(range(first + start - 1, first + end - 1))
            self.targets.extend(message.tokens[start:end])
            self.owners.extend([number] * (end - start))

    def _view(self, number: int, message: TraceMessage, trace: Trace, firsts: dict[tuple[int, str, int], int]) -> None:
        before = len(self.seen)
        for name, offset in zip((*message.parents, message.name), (*message.offsets, message.position), strict=True):
            parent = trace.by_name[name]
            count, place = len(parent.tokens), (number, name, offset)
            if place not in firsts:
                source = firsts[number, name, parent.position]
                firsts[place] = len(self.tokens) + len(self.mapped) + len(self.moved)
                self.moved.extend(range(source, source + count))
                self.shifts.extend([offset - parent.position] * count)
            self.seen.extend(range(firsts[place], firsts[place] + count))
            self.shown.extend(range(offset, offset + count))
        self.lengths.append(len(self.seen) - before)


class PackedAttention:
    """Differentiable counterpart of `StepAttention`, which the model's layers call; lives for one forward pass.

    Args:
        packed: Messages and their views.
        kinds: Attention kind of each layer.
        device: The model's device.
        mapper: Computes the KV of mapped messages; needed if there are any.
    """

    def __init__(
        self,
        packed: PackedTraces,
        kinds: Sequence[AttentionKind],
        device: torch.device,
        mapper: CacheMapper | None = None,
    ) -> None:
        self._packed, self._kinds, self._mapper = packed, kinds, mapper
        rows = (packed.positions, packed.mapped, packed.moved, packed.shifts, packed.seen, packed.shown)
        tensors = (torch.tensor(part, dtype=torch.long, device=device) for part in rows)
        self._positions, self._mapped, self._moved, self._shifts, self._seen, self._shown = tensors
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with [tokens, heads, head_dim] queries to [kv_heads, tokens, head_dim] keys and values.

        Queries and keys are rotated to the positions at which they were encoded. Returns [tokens, heads, head_dim].
        """
        kind, counts, lengths = self._kinds[layer], self._packed.counts, self._packed.lengths
        if self._packed.mapped:
            assert self._mapper is not None
            sources = key[:, self._mapped], value[:, self._mapped]
            keys, values = self._mapper.map(layer, *sources, self._positions[self._mapped])
            key, value = torch.cat((key, keys.to(key.dtype)), dim=1), torch.cat((value, values.to(value.dtype)), dim=1)
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        moved = _gather(key, self._moved)
        if kind.rotation is not None:
            moved = kind.rotation.apply(moved, *kind.rotation.cos_sin(self._shifts))
        seen_keys = _gather(torch.cat((key, moved)), self._seen)
        seen_values = _gather(torch.cat((value, _gather(value, self._moved))), self._seen)
        views = torch.split(seen_keys, lengths), torch.split(seen_values, lengths)
        masks = self._masks_of(kind.window, query.dtype)
        parts = zip(torch.split(query, counts), views[0], views[1], masks, strict=True)
        return torch.cat([_attend(*part, scale, kind.softcap, sinks) for part in parts])

    def _masks_of(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """Return the additive mask of each message, [tokens, seen tokens]: all parents, and its own tokens causally."""
        if (window, dtype) not in self._masks:
            masks = self._masks[window, dtype] = []
            own, seen = (self._positions, self._packed.counts), (self._shown, self._packed.lengths)
            for positions, shown in zip(torch.split(*own), torch.split(*seen), strict=True):
                hidden = torch.ones(len(positions), len(shown), dtype=torch.bool, device=positions.device)
                hidden = hidden.triu(1 + len(shown) - len(positions))
                if window is not None:
                    hidden = hidden | (positions[:, None] - shown >= window)
                masks.append(torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf))
        return self._masks[window, dtype]


def _gather(parts: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of [n, heads, head_dim]."""
    # `embedding`, not `index_select`: its backward accumulates rows many times faster on a CPU.
    return functional.embedding(rows, parts.reshape(len(parts), -1)).view(-1, *parts.shape[1:])


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute the attention of one message.

    Args:
        query: [tokens, heads, head_dim]; `key` and `value` [seen tokens, kv_heads, head_dim].
        mask: [tokens, seen tokens], added to the scores.
        scale: Factor on the scores.
        softcap: Of the scores.
        sinks: [heads].

    Returns:
        [tokens, heads, head_dim].
    """
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    grouped = query.view(len(query), kv_heads, group, -1).permute(1, 2, 0, 3)
    # The heads that share a key read one copy of it.
    keys, values = (part.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for part in (key, value))
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    else:  # no fused kernel has these
        scores = grouped @ keys.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores + mask
        if sinks is not None:
            column = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, len(query), 1)
            scores = torch.cat((scores, column), dim=-1)
        out = scores.softmax(dim=-1)[..., : len(key)] @ values
    return out.permute(2, 0, 1, 3).flatten(1, 2)
