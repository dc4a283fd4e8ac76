"""Hydragen over any DAG of segments: each run of slots is read once for all its readers, and the parts are merged.

For every run the queries of all its readers, times the heads that share a key head, are folded into one query block;
each reader's query is first rotated by minus the shift at which it sees the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.attention.layout import Layout
from choreo_agents.attention.partial import attend_run
from choreo_agents.attention.rope import PureRotation


class FoldedBackend:
    """One attention call per run of slots, on any device."""

    def __init__(self, rotation: PureRotation, device: torch.device) -> None:
        self.rotation = rotation
        self.device = device

    def prepare(self, layout: Layout) -> FoldedAttention:
        return FoldedAttention(layout, self.rotation, self.device)


class FoldedAttention:
    """Pairs are (token, run) in the order of the layout's reads.

        pairs    | read 0: tokens 0 1 2 3 | read 1: tokens 1 3 | read 2: token 0 | ...
    """

    def __init__(self, layout: Layout, rotation: PureRotation, device: torch.device) -> None:
        self.reads = layout.reads
        spans = [span for read in layout.reads for span in read.spans]
        tokens = torch.cat([torch.arange(span.first, span.first + span.count) for span in spans])
        shifts = torch.repeat_interleave(
            torch.tensor([span.shift for span in spans]), torch.tensor([span.count for span in spans])
        )
        self.tokens = tokens.to(device)
        self.moved = bool(shifts.any())
        if self.moved:
            self.cos, self.sin = (part.to(device) for part in rotation.cos_sin(-shifts))
        self.rotation = rotation

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        pairs = query[self.tokens]
        if self.moved:
            pairs = self.rotation.apply(pairs, self.cos, self.sin)
        heads, kv_heads = query.shape[1], keys.shape[0]
        group, dim = heads // kv_heads, query.shape[2]
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        first = 0
        for read in self.reads:
            count = read.queries
            block = pairs[first : first + count]
            first += count
            end = read.start + read.length
            run_keys, run_values = keys[:, read.start : end], values[:, read.start : end]
            if read.causal:
                out, lse = attend_run(block.transpose(0, 1), run_keys, run_values, scale, causal=True)
                outs.append(out.transpose(0, 1))
                lses.append(lse.transpose(0, 1))
            else:
                folded = block.view(count, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, count * group, dim)
                out, lse = attend_run(folded, run_keys, run_values, scale, causal=False)
                outs.append(out.reshape(kv_heads, count, group, dim).transpose(0, 1).reshape(count, heads, dim))
                lses.append(lse.reshape(kv_heads, count, group).transpose(0, 1).reshape(count, heads))
        return merge(torch.cat(outs), torch.cat(lses), self.tokens, len(query))


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
