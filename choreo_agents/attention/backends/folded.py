"""Hydragen for any DAG of segments: each run of slots is read once for all its readers, and the parts are merged.

For every run the queries of all its readers, times the heads that share a key head, are folded into one query block;
each reader's query is first rotated by minus the shift at which it sees the run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from choreo_agents.attention.backends.partial import (
    LogSumExpMerge,
    Partial,
    attend_lone,
    attend_padded,
    attend_run,
    takes_lone,
)
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, Read, readers_of, tokens_of, windowed
from choreo_agents.attention.rope import PureRotation

LONGEST_RUN = 128
MOST_QUERIES = 32
"""Upper bounds for packing: for longer runs, or more queries, the copy would cost more than a call of their own."""
FEWEST_PACKED, FEWEST_LONE_PACKED = 2, 5
"""Fewest short runs that repay packing, and fewest if each has a single query: such a call costs little."""
MOST_TURNED = 64
"""Upper bound on pairs rotated by a matrix each, which takes fewer operations when tensors are small."""


class FoldedBackend:
    """Attention in one call per long run of slots and one for all short runs, on any device.

    Args:
        dtype: Of keys, values and queries.
        device: Of keys, values and queries.
        why: Why no faster backend is used, if one was tried.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, why: str = "") -> None:
        self.dtype = dtype
        self.device = device
        self.why = why

    def prepare(self, layout: Layout, kind: AttentionKind) -> FoldedAttention:
        return FoldedAttention(layout if kind.window is None else windowed(layout, kind.window), kind, self)


class FoldedAttention:
    """A step's attention. Pairs are (token, run): packed short runs first, then reads of a single query, then others.

    pairs    | packed: tokens 0 1 2 3 1 3 | lone: token 0 | lone: token 2 | read, causal: tokens 4 5 6 | ...
    """

    def __init__(self, layout: Layout, kind: AttentionKind, backend: FoldedBackend) -> None:
        self.layout = layout
        self.kind = kind
        plain = kind.softcap is None and takes_lone(backend.device)
        short = [read for read in layout.reads if packable(read)]
        alone = plain and all(read.queries == 1 for read in short)
        if len(short) < (FEWEST_LONE_PACKED if alone else FEWEST_PACKED):
            short = []
        self.packed = PackedRuns(short, backend.dtype, backend.device, kind.softcap) if short else None
        single = [read for read in layout.reads if not (short and packable(read))]
        single.sort(key=lambda read: not (plain and read.queries == 1 and read.window is None))
        self.lone = [(r.start, r.length) for r in single if plain and r.queries == 1 and r.window is None]
        self.single = [(read, _make_mask(layout, read, backend)) for read in single]
        spans = [span for read in (*short, *single) for span in read.spans]
        tokens, shifts, _ = tokens_of(spans)
        self.tokens = torch.from_numpy(tokens).to(backend.device)
        self.rotation = kind.rotation if any(span.shift for span in spans) else None
        self._turns: Tensor | None = None
        if self.rotation is not None:
            angles = self.rotation.cos_sin(torch.from_numpy(-shifts))
            self.cos, self.sin = (part.to(backend.device) for part in angles)
        whole = len(layout.reads) == 1 and tokens.tolist() == list(range(len(layout.positions)))
        self.merging = None if whole else LogSumExpMerge(tokens, len(layout.positions), backend.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        pairs = query[self.tokens]
        if self.rotation is not None:
            pairs = self._rotate(self.rotation, pairs)
        parts: list[Partial] = []
        first = lone_count = 0
        if self.packed is not None:
            first = self.packed.pairs
            parts.append(self.packed.attend(pairs[:first], keys, values, scale))
        if self.lone and query.shape[1] > keys.shape[0]:
            lone_count = len(self.lone)
            parts.append(attend_lone(pairs[first : first + lone_count], keys, values, self.lone, scale))
            first += lone_count
        for read, hidden in self.single[lone_count:]:
            block = pairs[first : first + read.queries]
            first += read.queries
            parts.append(self._attend_read(read, hidden, block, keys, values, scale))
        joint: Tensor | None
        if self.merging is None:
            [(out, joint)] = parts
        else:
            outs, lses = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            out, joint = self.merging.join(outs, lses, with_lse=sinks is not None)
        return out if sinks is None or joint is None else with_sinks(out, joint, sinks)

    def _attend_read(
        self, read: Read, hidden: Tensor | None, block: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Partial:
        """Attend from a read's queries [count, heads, head_dim]; the output has the same shape."""
        run, softcap = slice(read.start, read.start + read.length), self.kind.softcap
        keys, values = keys[:, run], values[:, run]
        if read.causal or hidden is not None:
            block = block.transpose(0, 1)
            out, lse = attend_run(block, keys, values, scale, causal=read.causal, hidden=hidden, softcap=softcap)
            return out.transpose(0, 1), lse.transpose(0, 1)
        count, heads, dim = block.shape
        kv_heads = keys.shape[0]
        folded = block.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
        out, lse = attend_run(folded, keys, values, scale, causal=False, softcap=softcap)
        out = out.reshape(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)
        return out, lse.reshape(kv_heads, count, -1).transpose(0, 1).reshape(count, heads)

    def _rotate(self, rotation: PureRotation, pairs: Tensor) -> Tensor:
        """Rotate each pair's query by minus the shift of its run."""
        if len(pairs) > MOST_TURNED or pairs.dtype == torch.float64:
            return rotation.apply(pairs, self.cos, self.sin)
        if self._turns is None:
            basis = torch.eye(pairs.shape[-1], dtype=torch.float32, device=pairs.device).expand(len(pairs), -1, -1)
            self._turns = rotation.apply(basis, self.cos, self.sin)
        return (pairs.float() @ self._turns).to(pairs.dtype)


def packable(read: Read) -> bool:
    masked = read.causal or read.window is not None
    return not masked and read.length <= LONGEST_RUN and read.queries <= MOST_QUERIES


class PackedRuns:
    """Short runs with their queries, both padded to a batch.

    slots     [runs, longest run]       slots of each run in the pool, padded with its first
    queries   [runs, most queries]      pairs that read the run, padded with its first
    """

    def __init__(self, reads: Sequence[Read], dtype: torch.dtype, device: torch.device, softcap: float | None) -> None:
        self.softcap = softcap
        lengths = torch.tensor([read.length for read in reads])
        counts = torch.tensor([read.queries for read in reads])
        starts = torch.tensor([read.start for read in reads])
        across = torch.arange(int(lengths.max()))[None, :]
        padded = across >= lengths[:, None]
        self.slots = (starts[:, None] + across.masked_fill(padded, 0)).flatten().to(device)
        self.hidden = (
            torch.zeros(padded.shape, dtype=dtype).masked_fill(padded, float("-inf"))[:, None, None, :].to(device)
        )
        first = counts.cumsum(0) - counts
        along = torch.arange(int(counts.max()))[None, :]
        beyond = along >= counts[:, None]
        self.queries = (first[:, None] + along.masked_fill(beyond, 0)).to(device)
        self.real = (~beyond).flatten().nonzero().flatten().to(device)
        self.pairs = int(counts.sum())

    def attend(self, pairs: Tensor, keys: Tensor, values: Tensor, scale: float) -> Partial:
        """Attend from [pairs, heads, head_dim] queries, in the order of their reads.

        Returns:
            Output [pairs, heads, head_dim] and log-sum-exp [pairs, heads].
        """
        runs, most = self.queries.shape
        kv_heads, _, dim = keys.shape
        heads = pairs.shape[1]
        group = heads // kv_heads
        query = (
            pairs[self.queries].view(runs, most, kv_heads, group, dim).transpose(1, 2).reshape(runs, kv_heads, -1, dim)
        )
        key = keys.index_select(1, self.slots).view(kv_heads, runs, -1, dim).transpose(0, 1)
        value = values.index_select(1, self.slots).view(kv_heads, runs, -1, dim).transpose(0, 1)
        out, lse = attend_padded(query, key, value, self.hidden, scale, self.softcap)
        out = out.view(runs, kv_heads, most, group, dim).transpose(1, 2).reshape(runs * most, heads, dim)
        lse = lse.view(runs, kv_heads, most, group).transpose(1, 2).reshape(runs * most, heads)
        return out[self.real], lse[self.real]


def _make_mask(layout: Layout, read: Read, backend: FoldedBackend) -> Tensor | None:
    """Return the mask of a read's window, [queries, slots] of 0 or -inf; None without a window."""
    if read.window is None:
        return None
    slots, readers = torch.arange(read.length), readers_of(layout, read, read.spans)
    lows, highs = torch.from_numpy(readers.lows), torch.from_numpy(readers.highs)
    hidden = (slots < lows[:, None]) | (slots >= highs[:, None])
    mask = torch.zeros(hidden.shape, dtype=backend.dtype).masked_fill(hidden, float("-inf"))
    return mask.to(backend.device)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Rescale attention for a sink in each head, which takes a share of the softmax and adds nothing.

    Args:
        out: [tokens, heads, head_dim] without sinks.
        lse: [tokens, heads].
        sinks: [heads].
    """
    return (out.float() * (lse - sinks.float()).sigmoid()[..., None]).to(out.dtype)
