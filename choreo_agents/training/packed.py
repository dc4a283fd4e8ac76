"""Whole workflows as one packed row of tokens, and differentiable attention over it: each message attends to what its
view shows, where it shows it.

keys      [rows, kv_heads * head_dim]   the model's, then the mapped ones, then those moved to where views show them
gathered  [messages, kv_heads, keys, head_dim], one block a bucket: few of them, with little padding
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
    """A message as another sees it: rows `first` to `first + count` of the bank, `shift` positions further.

    The bank holds the row's tokens in their order, then those of mapped messages, which the row does not hold.
    """

    first: int
    count: int
    position: int
    """Where its first token was encoded."""
    shift: int


@dataclass(frozen=True)
class PackedMessage:
    """A message of the row: `count` tokens from `first` on, the first of them at `position`."""

    first: int
    count: int
    position: int
    view: tuple[SeenRows, ...]
    """Its parents, in order."""


@dataclass(frozen=True)
class MappedMessage:
    """Rows of the bank, from `first` on, whose KV is made of that of as many rows from `source` on."""

    source: int
    first: int
    count: int
    position: int


@dataclass
class PackedTraces:
    """Several traces side by side: every message's tokens once, none of a trace sees any of another.

    row     | trace 0: message 0 | message 1 | ... | trace 1: message 0 | ... |
    bank    | the same rows                                                   | mapped messages |
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Where each token was encoded."""
    messages: list[PackedMessage] = field(default_factory=list)
    mapped: list[MappedMessage] = field(default_factory=list)
    predictors: list[int] = field(default_factory=list)
    """Rows whose logits predict the learnt tokens: each stands just before its own."""
    targets: list[int] = field(default_factory=list)
    """The learnt tokens."""
    owners: list[int] = field(default_factory=list)
    """The number of each learnt token's trace."""
    rows_of_adapters: dict[str, list[int]] = field(default_factory=dict)
    """Which rows each adapter encodes."""

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> PackedTraces:
        """Pack them in their order."""
        packed, bank = cls(), sum(trace.tokens for trace in traces)
        for number, trace in enumerate(traces):
            firsts: dict[str, int] = {}
            for message in trace.messages:
                if not message.mapped:
                    firsts[message.name] = len(packed.tokens)
                    packed._encode(number, message, _view(trace, message, firsts))
                    continue
                firsts[message.name], count = bank, len(message.tokens)
                packed.mapped.append(MappedMessage(firsts[message.parents[0]], bank, count, message.position))
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
    """A message's parents, whose rows begin at `firsts`."""
    parents = [trace.by_name[parent] for parent in message.parents]
    return tuple(
        SeenRows(firsts[parent.name], len(parent.tokens), parent.position, offset - parent.position)
        for parent, offset in zip(parents, message.offsets, strict=True)
    )


BUCKET_COST = 4096
"""What one more bucket costs, ..."""
KEY_COST = 24
"""... and what a key costs besides being scored, both in pairs of query and key that could be scored instead."""
_STEPS = 8
"""Lengths that are told apart between one power of two and the next."""


@dataclass(frozen=True)
class Bucket:
    """Messages by number, padded to the longest of them."""

    members: tuple[int, ...]
    queries: int
    """The most tokens of its own that one of them has, ..."""
    keys: int
    """... and the most that one sees, its own among them."""


def bucketed(queries: Sequence[int], keys: Sequence[int]) -> list[Bucket]:
    """Cut messages into buckets of like lengths, at the least cost among cuts of one order.

    Args:
        queries: Tokens of each message.
        keys: Tokens that each sees, its own among them.
    """
    classes: dict[tuple[int, int], list[int]] = {}
    for number, (query, key) in enumerate(zip(queries, keys, strict=True)):
        # By powers of two of the queries first: one long message must not stretch many short ones.
        classes.setdefault((math.ceil(math.log2(query)), _rounded(key)), []).append(number)
    ordered = [classes[name] for name in sorted(classes)]
    longest = [(max(queries[i] for i in group), max(keys[i] for i in group)) for group in ordered]
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(ordered) + 1):
        found = (math.inf, 0)
        members, query, key = 0, 0, 0
        for start in range(end - 1, -1, -1):
            members += len(ordered[start])
            query, key = max(query, longest[start][0]), max(key, longest[start][1])
            cost = best[start][0] + BUCKET_COST + members * key * (query + KEY_COST)
            found = min(found, (cost, start))
        best.append(found)
    cuts: list[Bucket] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        those = tuple(i for group in ordered[start:end] for i in group)
        cuts.append(Bucket(those, max(queries[i] for i in those), max(keys[i] for i in those)))
        end = start
    return cuts[::-1]


def _rounded(length: int) -> int:
    """Up to a multiple of an eighth of its power of two."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * _STEPS))
    return -(-length // step) * step


Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class PackedAttention:
    """Handed through the model's forward as `StepAttention` is, and differentiable; lives for one pass.

    Args:
        packed: Who sees what.
        kinds: How each of the model's layers attends.
        device: Where it runs.
        mapper: Makes the KV of mapped messages; needed if there are any.
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
        self._lengths, rows, self._shown, moved, sources, self._shifts = _views(packed)
        self._queries = np.array([message.count for message in packed.messages])
        self.buckets: list[Bucket] = bucketed(self._queries.tolist(), self._lengths.tolist())
        self._places = [self._seen_places(bucket) for bucket in self.buckets]
        self._value_rows = self._tensor(np.concatenate([rows[places].ravel() for places in self._places]))
        self._moved_rows = self._tensor(np.concatenate([moved[places].ravel() for places in self._places]))
        self._query_rows, self._out_rows = (self._tensor(own) for own in self._own_rows())
        self._sources = self._tensor(sources)
        self._turns: dict[PureRotation, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, int, torch.dtype], list[Tensor]] = {}
        self._mapped_sources = self._tensor(_runs([(m.source, m.count) for m in packed.mapped]))
        self._mapped_positions = self._tensor(_runs([(m.position, m.count) for m in packed.mapped]))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with [tokens, heads, head_dim] queries to [kv_heads, tokens, head_dim] keys and values.

        All come rotated to their own positions. Returns [tokens, heads, head_dim].
        """
        kind = self._kinds[layer]
        heads, dim = query.shape[1:]
        if self._mapper is not None and self._packed.mapped:
            key, value = self._with_mapped(self._mapper, layer, key, value)
        keys = self._with_moved(kind.rotation, key.transpose(0, 1))
        rows = self._value_rows if kind.rotation is None else self._moved_rows
        counts, lengths = [bucket.queries for bucket in self.buckets], [bucket.keys for bucket in self.buckets]
        asking = self._in_buckets(_gathered(query, self._query_rows), counts)
        seen = self._in_buckets(_gathered(keys, rows), lengths)
        told = self._in_buckets(_gathered(value.transpose(0, 1), self._value_rows), lengths)
        masks = self._masks_of(kind.window, heads // len(key), query.dtype)
        outs = [
            _attended(q.view(*q.shape[:2], len(key), -1, dim), k, v, mask, scale, kind.softcap, sinks)
            for q, k, v, mask in zip(asking, seen, told, masks, strict=True)
        ]
        return functional.embedding(self._out_rows, torch.cat(outs)).view(-1, heads, dim)

    def _with_mapped(self, mapper: CacheMapper, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The bank: [kv_heads, rows, head_dim] keys and values of the row, then of mapped messages."""
        sources = self._mapped_sources
        keys, values = mapper.map(layer, key[:, sources], value[:, sources], self._mapped_positions)
        return torch.cat((key, keys.to(key.dtype)), dim=1), torch.cat((value, values.to(value.dtype)), dim=1)

    def _with_moved(self, rotation: PureRotation | None, keys: Tensor) -> Tensor:
        """[rows, kv_heads, head_dim] keys, and behind them those that are seen elsewhere, turned to there."""
        if rotation is None or not len(self._sources):
            return keys
        if rotation not in self._turns:
            self._turns[rotation] = rotation.cos_sin(self._tensor(self._shifts))
        sources = _gathered(keys, self._sources).view(-1, *keys.shape[1:])
        return torch.cat((keys, rotation.apply(sources, *self._turns[rotation])))

    def _in_buckets(self, rows: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
        """[rows, width] as one block a bucket: [members, length, width]."""
        sizes = [len(bucket.members) * length for bucket, length in zip(self.buckets, lengths, strict=True)]
        blocks = zip(torch.split(rows, sizes), lengths, strict=True)
        return tuple(block.view(-1, length, rows.shape[-1]) for block, length in blocks)

    def _seen_places(self, bucket: Bucket) -> Integers:
        """[members, keys], where among all that is seen each key of a bucket stands; padding repeats the first."""
        ends = np.cumsum(self._lengths)
        members = np.array(bucket.members)
        starts, lengths = (ends - self._lengths)[members, None], self._lengths[members, None]
        places = np.arange(bucket.keys)[None]
        return starts + np.where(places < lengths, places, 0)

    def _own_rows(self) -> tuple[Integers, Integers]:
        """The row of each padded query, and where among them each row's query stands."""
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
        """What is added to the scores of each bucket: [members, 1, group * queries, keys]."""
        name = (window, group, dtype)
        if name not in self._masks:
            self._masks[name] = [
                self._mask(bucket, places, window, group, dtype)
                for bucket, places in zip(self.buckets, self._places, strict=True)
            ]
        return self._masks[name]

    def _mask(self, bucket: Bucket, places: Integers, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        members = np.array(bucket.members)
        seen, own = (self._tensor(lengths[members])[:, None, None] for lengths in (self._lengths, self._queries))
        steps = torch.arange(bucket.queries, device=self._device)[None, :, None]
        keys = torch.arange(bucket.keys, device=self._device)[None, None]
        visible = keys <= seen - own + steps  # all of the parents, and oneself causally
        if window is not None:
            starts = self._tensor(np.array([self._packed.messages[i].position for i in bucket.members]))
            shown = self._tensor(self._shown[places])[:, None]
            visible = visible & (starts[:, None, None] + steps - shown < window)
        # A padded query sees everything, so that its softmax is one of something; nothing reads it.
        visible = visible | (steps >= own)
        mask = torch.zeros(visible.shape, dtype=dtype, device=self._device).masked_fill_(~visible, -torch.inf)
        return mask.repeat(1, group, 1)[:, None]

    def _tensor(self, values: Integers) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)


def _gathered(parts: Tensor, rows: Tensor) -> Tensor:
    """Rows of [n, heads, head_dim], as [rows, heads * head_dim]."""
    # `embedding`, not `index_select`: its backward adds up rows many times as fast on a CPU.
    return functional.embedding(rows, parts.reshape(len(parts), -1))


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One bucket's attention.

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
        out = _softened(folded, keys, values, mask, scale, softcap, sinks)
    apart = out.view(members, kv_heads, group, queries, dim).permute(0, 3, 1, 2, 4)
    return apart.reshape(members * queries, kv_heads * group * dim)


def _softened(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores or sinks, which the fused kernels do not know."""
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
    """All of several runs of integers, each given by its first and its length."""
    firsts, counts = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    starts = np.cumsum(counts) - counts
    return np.repeat(firsts - starts, counts) + np.arange(counts.sum())


def _views(packed: PackedTraces) -> tuple[Integers, Integers, Integers, Integers, Integers, Integers]:
    """What all messages see, one after the other.

    Returns:
        [messages], tokens that each sees, its own last. [seen tokens], rows of the bank; the position where each is
        seen; rows of the bank with the moved keys behind it. [moved keys], the row of the bank that each is made of,
        and how much further it is seen.
    """
    pieces = [
        (number, piece)
        for number, message in enumerate(packed.messages)
        for piece in (*message.view, SeenRows(message.first, message.count, message.position, 0))
    ]
    lengths = np.bincount(
        [number for number, _ in pieces], weights=[piece.count for _, piece in pieces], minlength=len(packed.messages)
    ).astype(np.int64)
    bank = len(packed.tokens) + sum(mapped.count for mapped in packed.mapped)
    # A message that several see at one place is moved there once.
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
