"""Attention on a GPU: the variable-length kernel that torch brings, over chunks of segments, merged.

Every chunk of at most 1,024 slots is one sequence of the kernel, with the queries of all its readers, times the heads
that share a key head, folded into its query side: what many rows see is read once, and a long segment is split over
the processors. How the kernel lays out what it returns, and whether it can be pointed at slots in place, differs
between releases: both are found out by trying, against the readable reference, before the backend is used at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from choreo_agents.attention.backends.folded import FoldedBackend, with_sinks
from choreo_agents.attention.backends.log_sum_exp import LogSumExpMerge
from choreo_agents.attention.backends.partial import Partial
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.rope import PureRotation
from choreo_agents.attention.window import windowed

CHUNK = 1024
"""Slots of one sequence at most."""
_TOLERANCE = 0.05
"""Of the trial, in half precision."""

HeadShape = tuple[int, int, int]
"""Heads, key heads, head_dim."""
USUAL_HEADS: HeadShape = (8, 2, 64)

VarlenKernel = Callable[..., tuple[Tensor, Tensor]]
"""(query, keys, values, starts of queries, starts of keys, longest query, longest key, and by name: scale,
window_size, enable_gqa, seqused_k) to output and log-sum-exp."""


@dataclass(frozen=True)
class Dialect:
    """What differs between releases of the kernel."""

    in_place: bool
    """Keys may be named by where they start, in any order, and how many there are; else they are gathered first."""
    heads_first: bool
    """The log-sum-exp comes as [heads, queries]; else [queries, heads]."""


class VarlenBackend:
    """The kernel in one of its dialects. `VarlenBackend.tried` finds out which."""

    def __init__(self, dtype: torch.dtype, device: torch.device, kernel: VarlenKernel, dialect: Dialect) -> None:
        self.dtype = dtype
        self.device = device
        self.kernel = kernel
        self.dialect = dialect
        self._folded = FoldedBackend(dtype, device)

    @classmethod
    def tried(
        cls,
        dtype: torch.dtype,
        device: torch.device,
        kernel: VarlenKernel | None = None,
        shape: HeadShape = USUAL_HEADS,
    ) -> VarlenBackend | None:
        """The backend in the first dialect that gives what the reference gives; None if none does.

        Args:
            dtype: Of keys and values.
            device: Where they are.
            kernel: What attends; None: torch's.
            shape: Of the model's heads: kernels serve some sizes only.
        """
        kernel = torch_kernel() if kernel is None else kernel
        if kernel is None or dtype not in (torch.float16, torch.bfloat16):
            return None
        for in_place in (True, False):
            for heads_first in (True, False):
                backend = cls(dtype, device, kernel, Dialect(in_place, heads_first))
                if _is_right(backend, shape):
                    return backend
        return None

    def prepare(self, layout: Layout, kind: AttentionKind) -> Any:
        """The step's attention; what the kernel has no words for goes the folded way."""
        seen = layout if kind.window is None else windowed(layout, kind.window)
        if kind.softcap is not None or any(read.window is not None for read in seen.reads):
            return self._folded.prepare(layout, kind)
        return VarlenAttention(seen, kind, self)


class VarlenAttention:
    """Pairs are (token, chunk): first those of chunks that are seen whole, then those of the rows' own, causally."""

    def __init__(self, layout: Layout, kind: AttentionKind, backend: VarlenBackend) -> None:
        self.layout = layout
        self.kind = kind
        self.backend = backend
        whole = [chunk for read in layout.reads if not read.causal for chunk in chunks(read)]
        causal = [read for read in layout.reads if read.causal]
        self.whole = _Sequences(whole, backend) if whole else None
        self.causal = _Sequences(causal, backend) if causal else None
        spans = [span for read in (*whole, *causal) for span in read.spans]
        counts = torch.tensor([span.count for span in spans])
        starts = torch.tensor([span.first for span in spans]) - (counts.cumsum(0) - counts)
        tokens = torch.repeat_interleave(starts, counts) + torch.arange(int(counts.sum()))
        self.tokens = tokens.to(backend.device)
        self.merging = LogSumExpMerge(self.tokens, len(layout.positions))
        self.moved = kind.rotation is not None and any(span.shift for span in spans)
        if self.moved:
            assert kind.rotation is not None
            shifts = torch.repeat_interleave(torch.tensor([span.shift for span in spans]), counts)
            self.cos, self.sin = (part.to(backend.device) for part in kind.rotation.cos_sin(-shifts))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        pairs = query[self.tokens]
        if self.moved:
            assert self.kind.rotation is not None
            pairs = self.kind.rotation.apply(pairs, self.cos, self.sin)
        parts: list[Partial] = []
        first = 0
        if self.whole is not None:
            first = self.whole.queries
            parts.append(self.whole.attend(pairs[:first], keys, values, scale, causal=False))
        if self.causal is not None:
            parts.append(self.causal.attend(pairs[first:], keys, values, scale, causal=True))
        outs, lses = (torch.cat(each) for each in zip(*parts, strict=True))
        out, joint = self.merging.join(outs, lses, with_lse=sinks is not None)
        return out if sinks is None or joint is None else with_sinks(out, joint, sinks)


class _Sequences:
    """Chunks as the kernel's sequences: where their queries and keys begin, and how many there are."""

    def __init__(self, reads: Sequence[Read], backend: VarlenBackend) -> None:
        self.backend = backend
        lengths = torch.tensor([read.length for read in reads])
        counts = torch.tensor([read.queries for read in reads])
        begins = torch.tensor([read.start for read in reads])
        self.queries = int(counts.sum())
        self.most_queries, self.longest = int(counts.max()), int(lengths.max())
        self.counts = counts
        device = backend.device
        ends = lengths.cumsum(0)
        within = torch.arange(int(lengths.sum())) - torch.repeat_interleave(ends - lengths, lengths)
        self.slots = (torch.repeat_interleave(begins, lengths) + within).to(device)
        self.gathered = _offsets(lengths).to(device)
        self.starts = torch.cat((begins, begins[-1:] + lengths[-1:])).to(torch.int32).to(device)
        self.lengths = lengths.to(torch.int32).to(device)
        self._folds: dict[int, Tensor] = {}

    def attend(self, pairs: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> Partial:
        """Partial attention of [pairs, heads, head_dim]: output, likewise, and log-sum-exp [pairs, heads]."""
        count, heads, dim = pairs.shape
        kv_heads = keys.shape[0]
        group = 1 if causal else heads // kv_heads
        if not causal:
            pairs = pairs.view(count, kv_heads, group, dim).transpose(1, 2).reshape(count * group, kv_heads, dim)
        if self.backend.dialect.in_place:
            # A sequence's keys are `lengths` from its start on: starts need not grow, nor sequences be next to another.
            where, used = self.starts, self.lengths
            seen = keys.transpose(0, 1), values.transpose(0, 1)
        else:
            where, used = self.gathered, None
            seen = keys[:, self.slots].transpose(0, 1).contiguous(), values[:, self.slots].transpose(0, 1).contiguous()
        out, lse = self.backend.kernel(
            pairs.contiguous(),
            *seen,
            self._queries_from(group),
            where,
            self.most_queries * group,
            self.longest,
            scale=scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=causal and heads != kv_heads,
            seqused_k=used,
        )
        lse = lse.transpose(0, 1) if self.backend.dialect.heads_first else lse
        if causal:
            return out, lse.float()
        out = out.view(count, group, kv_heads, dim).transpose(1, 2).reshape(count, heads, dim)
        return out, lse.float().reshape(count, group, kv_heads).transpose(1, 2).reshape(count, heads)

    def _queries_from(self, group: int) -> Tensor:
        if group not in self._folds:
            self._folds[group] = _offsets(self.counts * group).to(self.backend.device)
        return self._folds[group]


def chunks(read: Read) -> list[Read]:
    """A read cut into pieces of at most `CHUNK` slots."""
    return [
        Read(read.start + first, min(CHUNK, read.length - first), read.position + first, read.spans)
        for first in range(0, read.length, CHUNK)
    ]


def torch_kernel() -> VarlenKernel | None:
    """The kernel of this torch, or None if it has none that returns the log-sum-exp."""
    try:
        from torch.nn.attention import varlen  # noqa: PLC0415 - not in every torch
    except ImportError:
        return None
    attend, request = getattr(varlen, "varlen_attn", None), getattr(varlen, "AuxRequest", None)
    if attend is None or request is None:
        return None

    def kernel(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*tensors, return_aux=request(lse=True), **options)
        return out, lse

    return kernel


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).to(torch.int32)


def _is_right(backend: VarlenBackend, shape: HeadShape) -> bool:
    """Whether a backend gives what the reference gives, on a layout that shares, moves and cuts."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(drawn, generator=generator).to(backend.dtype).to(backend.device)
        for drawn in ((7, heads, dim), (kv_heads, 1400, dim), (kv_heads, 1400, dim))
    )
    layout = Layout(
        (1300, 1301, 1302, 1303, 40, 41, 1500),
        tuple(range(7)),
        (
            Read(9, 1300, 0, (QuerySpan(0, 4, 0), QuerySpan(6, 1, 130))),
            Read(3, 5, 7, (QuerySpan(4, 2, 28), QuerySpan(6, 1, -3))),
            Read(1310, 4, 1300, (QuerySpan(0, 4, 0),), causal=True),
            Read(1330, 2, 40, (QuerySpan(4, 2, 0),), causal=True),
        ),
    )
    kind = AttentionKind(PureRotation(1.0 / 10_000 ** (torch.arange(0, dim, 2) / dim)))
    try:
        got = VarlenAttention(layout, kind, backend).attend(query, keys, values, dim**-0.5)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    wanted = ReferenceBackend().prepare(layout, kind).attend(query.cpu(), keys.cpu(), values.cpu(), dim**-0.5)
    return bool((got.cpu().float() - wanted.float()).abs().max() <= _TOLERANCE)
