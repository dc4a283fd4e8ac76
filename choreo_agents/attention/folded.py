"""Hydragen over any DAG of segments: each run of slots is read once for all its readers, and the parts are merged.

For every run the queries of all its readers, times the heads that share a key head, are folded into one query block;
each reader's query is first rotated by minus the shift at which it sees the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.attention.layout import Layout, Read
from choreo_agents.attention.packed import PackedRuns, packable
from choreo_agents.attention.partial import Partial, attend_run
from choreo_agents.attention.rope import PureRotation


class FoldedBackend:
    """One attention call per long run of slots and one for all short ones together, on any device."""

    def __init__(self, rotation: PureRotation, dtype: torch.dtype, device: torch.device) -> None:
        self.rotation = rotation
        self.dtype = dtype
        self.device = device

    def prepare(self, layout: Layout) -> FoldedAttention:
        return FoldedAttention(layout, self)


class FoldedAttention:
    """Pairs are (token, run): first those of the packed short runs, then those of each other read.

    pairs    | packed: tokens 0 1 2 3 1 3 | read: token 0 | read, causal: tokens 4 5 6 | ...
    """

    def __init__(self, layout: Layout, backend: FoldedBackend) -> None:
        short = [read for read in layout.reads if packable(read)]
        if len(short) < 2:
            short = []
        self.packed = PackedRuns(short, backend.dtype, backend.device) if short else None
        self.single = [read for read in layout.reads if not (short and packable(read))]
        spans = [span for read in (*short, *self.single) for span in read.spans]
        counts = torch.tensor([span.count for span in spans])
        starts = torch.tensor([span.first for span in spans]) - (counts.cumsum(0) - counts)
        tokens = torch.repeat_interleave(starts, counts) + torch.arange(int(counts.sum()))
        shifts = torch.repeat_interleave(torch.tensor([span.shift for span in spans]), counts)
        self.tokens = tokens.to(backend.device)
        self.moved = bool(shifts.any())
        if self.moved:
            self.cos, self.sin = (part.to(backend.device) for part in backend.rotation.cos_sin(-shifts))
        self.rotation = backend.rotation
        self.lone = len(layout.reads) == 1 and tokens.tolist() == list(range(len(layout.positions)))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        pairs = query[self.tokens]
        if self.moved:
            pairs = self.rotation.apply(pairs, self.cos, self.sin)
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        first = 0
        if self.packed is not None:
            first = self.packed.pairs
            out, lse = self.packed.attend(pairs[:first], keys, values, scale)
            outs.append(out)
            lses.append(lse)
        for read in self.single:
            count = read.queries
            out, lse = _attend_read(read, pairs[first : first + count], keys, values, scale)
            first += count
            outs.append(out)
            lses.append(lse)
        if self.lone:
            return outs[0]
        return merge(torch.cat(outs), torch.cat(lses), self.tokens, len(query))


def _attend_read(read: Read, block: Tensor, keys: Tensor, values: Tensor, scale: float) -> Partial:
    """Partial attention of a read's queries [count, heads, head_dim], likewise laid out."""
    run_keys, run_values = (
        keys[:, read.start : read.start + read.length],
        values[:, read.start : read.start + read.length],
    )
    if read.causal:
        out, lse = attend_run(block.transpose(0, 1), run_keys, run_values, scale, causal=True)
        return out.transpose(0, 1), lse.transpose(0, 1)
    count, heads, dim = block.shape
    kv_heads = keys.shape[0]
    folded = block.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    out, lse = attend_run(folded, run_keys, run_values, scale, causal=False)
    out = out.reshape(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)
    return out, lse.reshape(kv_heads, count, -1).transpose(0, 1).reshape(count, heads)


def merge(outs: Tensor, lses: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Join partial softmax attentions exactly: weights are each part's share of the summed exponentials.

    Args:
        outs: [pairs, heads, head_dim] partial outputs.
        lses: [pairs, heads] log-sum-exps, fp32.
        tokens: [pairs], the token each pair belongs to; every token has at least one.
        count: Number of tokens.

    Returns:
        [count, heads, head_dim] in the dtype of `outs`.
    """
    heads = lses.shape[1]
    index = tokens[:, None].expand(-1, heads)
    highest = torch.full((count, heads), float("-inf"), device=lses.device, dtype=lses.dtype)
    highest = highest.scatter_reduce(0, index, lses, reduce="amax")
    weights = (lses - highest[tokens]).exp()
    total = torch.zeros_like(highest).index_add(0, tokens, weights)
    wide = torch.zeros((count, *outs.shape[1:]), device=outs.device, dtype=lses.dtype)
    wide = wide.index_add(0, tokens, outs.to(lses.dtype) * weights[..., None])
    return (wide / total[..., None]).to(outs.dtype)
