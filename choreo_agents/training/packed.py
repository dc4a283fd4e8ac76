"""Packs whole workflows into one row of tokens, with differentiable attention in which each message attends to its
view, at the view's positions.

keys      [rows, kv_heads * head_dim]   the row's, then mapped ones, then those rotated to other positions
gathered  [messages, kv_heads, keys, head_dim], a block for each bucket: few buckets, with little padding
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.rope import PureRotation
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.training.trace import Trace, TraceMessage


@dataclass(frozen=True)
class SeenRows:
    """A message that another sees, or that a mapper maps: rows `first` to `first + count` of the bank.

    The bank holds the row's tokens in their order, then those of mapped messages, which the row does not hold.
    """

    first: int
    count: int
    position: int
    """Position at which its first token was encoded."""
    shift: int = 0
    """Number of positions by which it is seen further on."""


@dataclass(frozen=True)
class PackedMessage:
    """A message of the row: `count` tokens from row `first` on, the first of them at `position`."""

    first: int
    count: int
    position: int
    view: tuple[SeenRows, ...]
    """Parents, in order."""


@dataclass
class PackedTraces:
    """Several traces in one row: every message's tokens once; no trace sees another.

    row     | trace 0: message 0 | message 1 | ... | trace 1: message 0 | ... |
    bank    | the same rows                                                   | mapped messages |
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position at which each token was encoded."""
    messages: list[PackedMessage] = field(default_factory=list)
    mapped: list[SeenRows] = field(default_factory=list)
    """Rows that mapped messages are computed from, in the order of those in the bank."""
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
        packed, bank = cls(), sum(trace.tokens for trace in traces)
        for number, trace in enumerate(traces):
            firsts: dict[str, int] = {}
            for message in trace.messages:
                if not message.mapped:
                    firsts[message.name] = len(packed.tokens)
                    packed._encode(number, message, _view(trace, message, firsts))
                    continue
                firsts[message.name], count = bank, len(message.tokens)
                packed.mapped.append(SeenRows(firsts[message.parents[0]], count, message.position))
                bank += count
        return packed

    def _encode(self, number: int, message: TraceMessage, view: tuple[SeenRows, ...]) -> None:
        first, count = len(self.tokens), len(message.tokens)
        self.messages.append(PackedMessage(first, count, message.position, view))
        self.tokens.extend(message.tokens)
        self.positions.extend(range(message.position, message.position + count))
        if message.adapter is not None:
            self.rows_of_adapters.setdefault(message.adapter, []).extend(range(first, first + count))
        if message.learn is not None:
            start, end = message.learn
            self.predictors.extend(range(first + start - 1, first + end - 1))
            self.targets.extend(message.tokens[start:end])
            self.owners.extend([number] * (end - start))


def _view(trace: Trace, message: TraceMessage, firsts: Mapping[str, int]) -> tuple[SeenRows, ...]:
    """Return a message's parents as rows of the bank, which begin at `firsts`."""
    parents = [trace.by_name[parent] for parent in message.parents]
    placed = zip(parents, message.offsets, strict=True)
    return tuple(SeenRows(firsts[p.name], len(p.tokens), p.position, offset - p.position) for p, offset in placed)


BUCKET_COST = 8192
"""Cost of a bucket, in scored pairs of query and key."""
KEY_COST = 24
"""Cost of gathering a key, in scored pairs of query and key."""


@dataclass(frozen=True)
class Bucket:
    """A group of messages, by index, that are padded to the longest of them."""

    members: tuple[int, ...]
    queries: int
    """Most tokens of a member."""
    keys: int
    """Most tokens that a member sees, including its own."""


def bucketed(queries: Sequence[int], keys: Sequence[int]) -> list[Bucket]:
    """Group messages of similar lengths: a bucket grows until its padding would cost more than another bucket.

    Args:
        queries: Tokens of each message.
        keys: Tokens that each message sees, including its own.
    """
    # Sorted by powers of two of the queries first: one long message must not pad many short ones.
    ordered = sorted(range(len(queries)), key=lambda number: (math.ceil(math.log2(queries[number])), keys[number]))
    groups: list[list[int]] = []
    longest_query = longest_key = unpadded = 0
    for number in ordered:
        own_cost = keys[number] * (queries[number] + KEY_COST)
        longest_query, longest_key = max(longest_query, queries[number]), max(longest_key, keys[number])
        unpadded += own_cost
        members = len(groups[-1]) + 1 if groups else 1
        if not groups or members * longest_key * (longest_query + KEY_COST) > unpadded + BUCKET_COST:
            groups.append([])
            longest_query, longest_key, unpadded = queries[number], keys[number], own_cost
        groups[-1].append(number)
    return [Bucket(tuple(group), max(queries[i] for i in group), max(keys[i] for i in group)) for group in groups]


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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
        assert mapper is not None or not packed.mapped
        self._packed, self._kinds, self._device, self._mapper = packed, kinds, device, mapper
        self._lengths, rows, self._shown, moved, sources, self._shifts = _concat_views(packed)
        self._queries = np.array([message.count for message in packed.messages])
        self.buckets: list[Bucket] = bucketed(self._queries.tolist(), self._lengths.tolist())
        self._places = [self._key_indices(bucket) for bucket in self.buckets]
        self._value_rows = self._tensor(np.concatenate([rows[places].ravel() for places in self._places]))
        self._moved_rows = self._tensor(np.concatenate([moved[places].ravel() for places in self._places]))
        self._query_rows, self._out_rows = (self._tensor(own) for own in self._query_indices())
        self._sources = self._tensor(sources)
        self._turns: dict[PureRotation, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, int, torch.dtype], list[Tensor]] = {}
        self._mapped_sources = self._tensor(_runs([(m.first, m.count) for m in packed.mapped]))
        self._mapped_positions = self._tensor(_runs([(m.position, m.count) for m in packed.mapped]))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with [tokens, heads, head_dim] queries to [kv_heads, tokens, head_dim] keys and values.

        Queries and keys are rotated to the positions at which they were encoded. Returns [tokens, heads, head_dim].
        """
        kind = self._kinds[layer]
        heads, dim = query.shape[1:]
        if self._mapper is not None and self._packed.mapped:
            key, value = self._with_mapped(self._mapper, layer, key, value)
        keys = self._with_moved(kind.rotation, key.transpose(0, 1))
        rows = self._value_rows if kind.rotation is None else self._moved_rows
        counts, lengths = [bucket.queries for bucket in self.buckets], [bucket.keys for bucket in self.buckets]
        query_blocks = self._in_buckets(_gather(query, self._query_rows), counts)
        key_blocks = self._in_buckets(_gather(keys, rows), lengths)
        value_blocks = self._in_buckets(_gather(value.transpose(0, 1), self._value_rows), lengths)
        masks = self._masks_of(kind.window, heads // len(key), query.dtype)
        outs = [
            _attend(q.view(*q.shape[:2], len(key), -1, dim), k, v, mask, scale, kind.softcap, sinks)
            for q, k, v, mask in zip(query_blocks, key_blocks, value_blocks, masks, strict=True)
        ]
        return functional.embedding(self._out_rows, torch.cat(outs)).view(-1, heads, dim)

    def _with_mapped(self, mapper: CacheMapper, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bank: [kv_heads, rows, head_dim] keys and values of the row, then of mapped messages."""
        sources = self._mapped_sources
        keys, values = mapper.map(layer, key[:, sources], value[:, sources], self._mapped_positions)
        return torch.cat((key, keys.to(key.dtype)), dim=1), torch.cat((value, values.to(value.dtype)), dim=1)

    def _with_moved(self, rotation: PureRotation | None, keys: Tensor) -> Tensor:
        """Append to [rows, kv_heads, head_dim] keys those that are seen at other positions, rotated to these."""
        if rotation is None or not len(self._sources):
            return keys
        if rotation not in self._turns:
            self._turns[rotation] = rotation.cos_sin(self._tensor(self._shifts))
        sources = _gather(keys, self._sources).view(-1, *keys.shape[1:])
        return torch.cat((keys, rotation.apply(sources, *self._turns[rotation])))

    def _in_buckets(self, rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """Split [rows, width] into a block for each bucket: [members, length, width]."""
        sizes = [len(bucket.members) * length for bucket, length in zip(self.buckets, lengths, strict=True)]
        blocks = zip(torch.split(rows, sizes), lengths, strict=True)
        return tuple(block.view(-1, length, rows.shape[-1]) for block, length in blocks)

    def _key_indices(self, bucket: Bucket) -> Integers:
        """Return [members, keys] indices of a bucket's keys among all seen tokens; padding repeats the first key."""
        ends = np.cumsum(self._lengths)
        members = np.array(bucket.members)
        starts, lengths = (ends - self._lengths)[members, None], self._lengths[members, None]
        places = np.arange(bucket.keys)[None]
        return starts + np.where(places < lengths, places, 0)

    def _query_indices(self) -> tuple[Integers, Integers]:
        """Return the row of each padded query, and for each row the index of its query among the padded ones."""
        padded: list[Integers] = []
        back = np.zeros(len(self._packed.tokens), dtype=np.int64)
        at = 0
        firsts = np.array([message.first for message in self._packed.messages])
        for bucket in self.buckets:
            members = np.array(bucket.members)
            steps = np.arange(bucket.queries)[None]
            real = steps < self._queries[members, None]
            rows = firsts[members, None] + np.where(real, steps, 0)
            back[rows[real]] = at + np.flatnonzero(real)
            padded.append(rows.ravel())
            at += rows.size
        return np.concatenate(padded), back

    def _masks_of(self, window: int | None, group: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the additive mask of each bucket: [members, 1, group * queries, keys]."""
        name = (window, group, dtype)
        if name not in self._masks:
            pairs = zip(self.buckets, self._places, strict=True)
            self._masks[name] = [self._mask(bucket, places, *name) for bucket, places in pairs]
        return self._masks[name]

    def _mask(self, bucket: Bucket, places: Integers, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        members = np.array(bucket.members)
        total, own = (self._tensor(lengths[members])[:, None, None] for lengths in (self._lengths, self._queries))
        steps = torch.arange(bucket.queries, device=self._device)[None, :, None]
        keys = torch.arange(bucket.keys, device=self._device)[None, None]
        visible = keys <= total - own + steps  # all of the parents, and its own tokens causally
        if window is not None:
            starts = self._tensor(np.array([self._packed.messages[i].position for i in bucket.members]))
            shown = self._tensor(self._shown[places])[:, None]
            visible = visible & (starts[:, None, None] + steps - shown < window)
        # A padded query sees every key, because the softmax of an empty set is NaN; nothing reads its output.
        visible = visible | (steps >= own)
        mask = torch.zeros(visible.shape, dtype=dtype, device=self._device).masked_fill_(~visible, -torch.inf)
        return mask.repeat(1, group, 1)[:, None]

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)


def _gather(parts: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of [n, heads, head_dim] as [rows, heads * head_dim]."""
    # `embedding`, not `index_select`: its backward accumulates rows many times faster on a CPU.
    return functional.embedding(rows, parts.reshape(len(parts), -1))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute the attention of one bucket.

    Args:
        query: [members, queries, kv_heads, group, head_dim]; `key` and `value` [members, keys, kv_heads * head_dim].
        mask: [members, 1, group * queries, keys].
        scale: Factor on the scores.
        softcap: Of the scores.
        sinks: [heads].

    Returns:
        [members * queries, heads * head_dim].
    """
    members, queries, kv_heads, group, dim = query.shape
    # The heads that share a key are folded into one head of more queries: no key is copied for them.
    folded = query.permute(0, 2, 3, 1, 4).reshape(members, kv_heads, group * queries, dim)
    keys, values = (part.view(members, -1, kv_heads, dim).transpose(1, 2) for part in (key, value))
    if softcap is None and sinks is None:
        out = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        out = _attend_eagerly(folded, keys, values, mask, scale, softcap, sinks)
    apart = out.view(members, kv_heads, group, queries, dim).permute(0, 3, 1, 2, 4)
    return apart.reshape(members * queries, kv_heads * group * dim)


def _attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention with capped scores or sinks, which fused kernels do not support."""
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1) @ value
    members, kv_heads, folded, keys = scores.shape
    group = len(sinks) // kv_heads
    column = sinks.to(scores.dtype).view(1, kv_heads, group, 1).expand(members, -1, -1, folded // group)
    weights = torch.cat((scores, column.reshape(members, kv_heads, folded, 1)), dim=-1).softmax(dim=-1)
    return weights[..., :keys] @ value


def _runs(runs: Sequence[tuple[int, int]]) -> Integers:
    """Concatenate runs of consecutive integers, each given by its first integer and its length."""
    firsts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(counts.sum())


def _concat_views(packed: PackedTraces) -> tuple[Integers, Integers, Integers, Integers, Integers, Integers]:
    """Return the views of all messages, concatenated; each message sees its own tokens last.

    Returns:
        [messages]: number of seen tokens. [seen tokens]: row of the bank; position in the view; row of the bank with
        moved keys appended. [moved keys]: row of the bank that each is rotated from; shift of its position.
    """
    pieces = [
        (number, piece)
        for number, message in enumerate(packed.messages)
        for piece in (*message.view, SeenRows(message.first, message.count, message.position))
    ]
    numbers, counts = [number for number, _ in pieces], [piece.count for _, piece in pieces]
    lengths = np.bincount(numbers, weights=counts, minlength=len(packed.messages)).astype(np.int64)
    bank = len(packed.tokens) + sum(mapped.count for mapped in packed.mapped)
    # A message that several messages see at one position is rotated to it once.
    moved: dict[tuple[int, int], int] = {}
    sources: list[tuple[int, int]] = []
    end = bank
    for _, piece in pieces:
        if piece.shift and (piece.first, piece.shift) not in moved:
            moved[piece.first, piece.shift] = end
            sources.append((piece.first, piece.count))
            end += piece.count
    return (
        lengths,
        _runs([(piece.first, piece.count) for _, piece in pieces]),
        _runs([(piece.position + piece.shift, piece.count) for _, piece in pieces]),
        _runs([(moved.get((piece.first, piece.shift), piece.first), piece.count) for _, piece in pieces]),
        _runs(sources),
        np.repeat([shift for _, shift in moved], [count for _, count in sources]).astype(np.int64),
    )
