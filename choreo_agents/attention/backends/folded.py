"""Hydragen over any DAG of segments: each run of slots is read once for all its readers, and the parts are merged.

For every run the queries of all its readers, times the heads that share a key head, are folded into one query block;
each reader's query is first rotated by minus the shift at which it sees the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.attention.backends.log_sum_exp import LogSumExpMerge
from choreo_agents.attention.backends.packed import PackedRuns, packable
from choreo_agents.attention.backends.partial import Partial, attend_lone, attend_run, takes_lone
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, Read
from choreo_agents.attention.window import windowed

FEWEST_PACKED, FEWEST_LONE_PACKED = 2, 5
"""Short runs that repay packing, and so many if each has a single query: then its own call costs little."""
MOST_TURNED = 64
"""Pairs that are rotated by a matrix each: fewer operations, where there are few numbers to work on."""


class FoldedBackend:
    """One attention call per long run of slots and one for all short ones together, on any device.

    Args:
        dtype: Of keys, values and queries.
        device: Where they are.
        why: No faster backend serves, if one was asked for.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, why: str = "") -> None:
        self.dtype = dtype
        self.device = device
        self.why = why

    def prepare(self, layout: Layout, kind: AttentionKind) -> FoldedAttention:
        return FoldedAttention(layout if kind.window is None else windowed(layout, kind.window), kind, self)


class FoldedAttention:
    """Pairs are (token, run): first those of the packed short runs, then those of each other read, lone ones first.

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
        self.single = [(read, _hidden(layout, read, backend)) for read in single]
        spans = [span for read in (*short, *single) for span in read.spans]
        counts = torch.tensor([span.count for span in spans])
        starts = torch.tensor([span.first for span in spans]) - (counts.cumsum(0) - counts)
        tokens = torch.repeat_interleave(starts, counts) + torch.arange(int(counts.sum()))
        self.tokens = tokens.to(backend.device)
        self.moved = kind.rotation is not None and any(span.shift for span in spans)
        self._turns: Tensor | None = None
        if self.moved:
            assert kind.rotation is not None
            shifts = torch.repeat_interleave(torch.tensor([span.shift for span in spans]), counts)
            self.cos, self.sin = (part.to(backend.device) for part in kind.rotation.cos_sin(-shifts))
        whole = len(layout.reads) == 1 and tokens.tolist() == list(range(len(layout.positions)))
        self.merging = None if whole else LogSumExpMerge(tokens, len(layout.positions), backend.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        pairs = query[self.tokens]
        if self.moved:
            pairs = self._turned(pairs)
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        first = 0
        if self.packed is not None:
            first = self.packed.pairs
            out, lse = self.packed.attend(pairs[:first], keys, values, scale)
            outs.append(out)
            lses.append(lse)
        done = 0
        if self.lone and query.shape[1] > keys.shape[0]:
            done = len(self.lone)
            out, lse = attend_lone(pairs[first : first + done], keys, values, self.lone, scale)
            first += done
            outs.append(out)
            lses.append(lse)
        for read, hidden in self.single[done:]:
            block = pairs[first : first + read.queries]
            first += read.queries
            out, lse = _attend_read(read, hidden, block, keys, values, scale, self.kind.softcap)
            outs.append(out)
            lses.append(lse)
        if self.merging is None:
            return outs[0] if sinks is None else with_sinks(outs[0], lses[0], sinks)
        out, joint = self.merging.join(torch.cat(outs), torch.cat(lses), with_lse=sinks is not None)
        return out if sinks is None or joint is None else with_sinks(out, joint, sinks)

    def _turned(self, pairs: Tensor) -> Tensor:
        """Each pair's query as its run's shift asks for."""
        rotation = self.kind.rotation
        assert rotation is not None
        if len(pairs) > MOST_TURNED or pairs.dtype == torch.float64:
            return rotation.apply(pairs, self.cos, self.sin)
        if self._turns is None:
            basis = torch.eye(pairs.shape[-1], dtype=torch.float32, device=pairs.device).expand(len(pairs), -1, -1)
            self._turns = rotation.apply(basis, self.cos, self.sin)
        return (pairs.float() @ self._turns).to(pairs.dtype)


def _hidden(layout: Layout, read: Read, backend: FoldedBackend) -> Tensor | None:
    """What a read's window hides: [queries, slots], 0 or -inf; None without one."""
    if read.window is None:
        return None
    [span] = read.spans
    positions = torch.tensor(layout.positions[span.first : span.first + span.count])
    slots = read.position + span.shift + torch.arange(read.length)
    hidden = positions[:, None] - slots[None, :] >= read.window
    if read.causal:
        hidden |= positions[:, None] < slots[None, :]
    mask = torch.zeros(hidden.shape, dtype=backend.dtype).masked_fill(hidden, float("-inf"))
    return mask.to(backend.device)


def _attend_read(
    read: Read,
    hidden: Tensor | None,
    block: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
) -> Partial:
    """Partial attention of a read's queries [count, heads, head_dim], likewise laid out."""
    end = read.start + read.length
    run_keys, run_values = keys[:, read.start : end], values[:, read.start : end]
    if read.causal or hidden is not None:
        out, lse = attend_run(
            block.transpose(0, 1), run_keys, run_values, scale, causal=read.causal, hidden=hidden, softcap=softcap
        )
        return out.transpose(0, 1), lse.transpose(0, 1)
    count, heads, dim = block.shape
    kv_heads = keys.shape[0]
    folded = block.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    out, lse = attend_run(folded, run_keys, run_values, scale, causal=False, softcap=softcap)
    out = out.reshape(kv_heads, count, -1, dim).transpose(0, 1).reshape(count, heads, dim)
    return out, lse.reshape(kv_heads, count, -1).transpose(0, 1).reshape(count, heads)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention whose softmax gives a share to a sink of each head, which adds nothing.

    Args:
        out: [tokens, heads, head_dim] without sinks.
        lse: [tokens, heads].
        sinks: [heads].
    """
    return (out.float() * (lse - sinks.float()).sigmoid()[..., None]).to(out.dtype)
