"""Attention on a GPU: the variable-length flash kernel that torch brings, over chunks of segments, merged.

Every chunk of at most 1,024 slots is one sequence of the kernel, with the queries of all its readers, times the heads
that share a key head, folded into its query side: what many rows see is read once, and a long segment is split over
the processors. The kernel is called as the operator itself, by the names that its schema has in this torch. How it
lays out what it returns, and whether it can be pointed at slots in place, is tried before it is used at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.attention.backends.folded import FoldedBackend, with_sinks
from choreo_agents.attention.backends.log_sum_exp import LogSumExpMerge
from choreo_agents.attention.backends.partial import Partial, matmul_attention
from choreo_agents.attention.backends.trial import (
    RELATIVE_ERROR,
    SUM_ERROR,
    complaint_of,
    drawn_heads,
    error_line,
    runs_apart,
    worst,
)
from choreo_agents.attention.heads import USUAL_HEADS, HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, Read
from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.window import windowed

CHUNK = 1024
"""Slots of one sequence at most."""
_ASKED = frozenset(("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"))
"""Arguments without which the operator is another one."""

VarlenKernel = Callable[..., tuple[Tensor, Tensor]]
"""(query, keys, values, starts of queries, starts of keys, longest query, longest key, and by name: scale, causal,
seqused_k) to output and log-sum-exp; raises `NotImplementedError` if it is given a `seqused_k` and takes none."""


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
    ) -> VarlenBackend | str:
        """The backend in the first dialect that gives what plain products in doubles give; or why there is none.

        Args:
            dtype: Of keys and values.
            device: Where they are.
            kernel: What attends; None: torch's.
            shape: Of the model's heads: kernels serve some sizes only.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            return f"varlen takes half precision, not {dtype}"
        if kernel is not None:
            return _tried.__wrapped__(dtype, device, kernel, shape)
        refused: list[str] = []
        for splits in (True, False):  # some that name the argument take it from another kernel alone
            found = torch_kernel(splits)
            made = found if isinstance(found, str) else _tried(dtype, device, found, shape)
            if not isinstance(made, str):
                return made
            refused.append(made)
        return "; ".join(dict.fromkeys(refused))

    def prepare(self, layout: Layout, kind: AttentionKind) -> Any:
        """The step's attention; what the kernel has no words for goes the folded way."""
        seen = layout if kind.window is None else windowed(layout, kind.window)
        if kind.softcap is not None or any(read.window is not None for read in seen.reads):
            return self._folded.prepare(layout, kind)
        return VarlenAttention(seen, kind, self)


@cache
def _tried(dtype: torch.dtype, device: torch.device, kernel: VarlenKernel, shape: HeadShape) -> VarlenBackend | str:
    complaints: list[str] = []
    for in_place, heads_first in itertools.product((True, False), repeat=2):
        backend = VarlenBackend(dtype, device, kernel, Dialect(in_place, heads_first))
        try:
            complaint = _complaint(backend, shape) or complaint_of(backend, shape, dtype, device)
        except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedError among them
            complaint = error_line(error)
        if complaint is None:
            return backend
        complaints.append(complaint)
    return "varlen: " + "; ".join(dict.fromkeys(complaints))


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
        tokens = numpy.concatenate([numpy.arange(span.first, span.first + span.count) for span in spans])
        arrays = {"tokens": tokens}
        self.moved = kind.rotation is not None and any(span.shift for span in spans)
        if self.moved:
            assert kind.rotation is not None
            each = numpy.repeat([span.shift for span in spans], [span.count for span in spans])
            shifts, arrays["turns"] = numpy.unique(each, return_inverse=True)
            arrays["cos"], arrays["sin"] = kind.rotation.on_host(-shifts)
        packed = SentTables(arrays, backend.device)
        self.tokens = packed["tokens"]
        if self.moved:
            self.cos, self.sin = (packed[name].index_select(0, packed["turns"]) for name in ("cos", "sin"))
        self.merging = LogSumExpMerge(tokens, len(layout.positions), backend.device)

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
    """Chunks as the kernel's sequences: where their queries and keys begin, and how many there are.

    starts    [sequences + 1]   where each one's keys begin in the pool; the last number is asked for by the kernel only
    lengths   [sequences]       how many there are
    slots     [all keys]        the same, one by one, for a kernel that is not pointed at them ...
    gathered  [sequences + 1]   ... and where each sequence begins among these
    """

    def __init__(self, reads: Sequence[Read], backend: VarlenBackend) -> None:
        self.backend = backend
        lengths = numpy.array([read.length for read in reads])
        self.counts = numpy.array([read.queries for read in reads])
        begins = numpy.array([read.start for read in reads])
        self.queries = int(self.counts.sum())
        self.most_queries, self.longest = int(self.counts.max()), int(lengths.max())
        if backend.dialect.in_place:
            starts = numpy.append(begins, begins[-1] + lengths[-1]).astype(numpy.int32)
            arrays = {"starts": starts, "lengths": lengths.astype(numpy.int32)}
        else:
            runs = [numpy.arange(read.start, read.start + read.length) for read in reads]
            arrays = {"slots": numpy.concatenate(runs), "gathered": _offsets(lengths)}
        self.packed = SentTables(arrays, backend.device)
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
            where, used = self.packed["starts"], self.packed["lengths"]
            seen = keys.transpose(0, 1), values.transpose(0, 1)
        else:
            where, used, slots = self.packed["gathered"], None, self.packed["slots"]
            seen = keys[:, slots].transpose(0, 1).contiguous(), values[:, slots].transpose(0, 1).contiguous()
        out, lse = self.backend.kernel(
            pairs.contiguous(),
            *seen,
            self._queries_from(group),
            where,
            self.most_queries * group,
            self.longest,
            scale=scale,
            causal=causal,
            seqused_k=used,
        )
        lse = lse.transpose(0, 1) if self.backend.dialect.heads_first else lse
        if causal:
            return out, lse.float()
        out = out.view(count, group, kv_heads, dim).transpose(1, 2).reshape(count, heads, dim)
        return out, lse.float().reshape(count, group, kv_heads).transpose(1, 2).reshape(count, heads)

    def _queries_from(self, group: int) -> Tensor:
        if group not in self._folds:
            self._folds[group] = SentTables({"queries": _offsets(self.counts * group)}, self.backend.device)["queries"]
        return self._folds[group]


def chunks(read: Read) -> list[Read]:
    """A read cut into pieces of at most `CHUNK` slots."""
    return [
        Read(read.start + first, min(CHUNK, read.length - first), read.position + first, read.spans)
        for first in range(0, read.length, CHUNK)
    ]


def _offsets(lengths: NDArray[Any]) -> NDArray[Any]:
    return numpy.append(0, lengths.cumsum()).astype(numpy.int32)


@cache
def torch_kernel(splits: bool = True) -> VarlenKernel | str:
    """The kernel of this torch, by what its operator's schema says; or why there is none.

    Args:
        splits: Whether it is told, if it takes that, not to split sequences again: how would depend on what else there
            is in the step.
    """
    found = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if found is None:
        return "varlen: this torch has no aten::_flash_attention_forward"
    flash = found.default
    takes = {argument.name for argument in flash._schema.arguments}
    if not takes >= _ASKED:
        return f"varlen: aten::_flash_attention_forward takes no {', '.join(sorted(_ASKED - takes))}"
    once = {"num_splits": 1} if splits and "num_splits" in takes else {}

    def kernel(*given: Any, scale: float, causal: bool, seqused_k: Tensor | None) -> tuple[Tensor, Tensor]:
        if seqused_k is not None and "seqused_k" not in takes:
            raise NotImplementedError("this torch's kernel takes no seqused_k")
        used = {} if seqused_k is None else {"seqused_k": seqused_k}
        out, lse, *_ = flash(*given, 0.0, causal, False, scale=scale, **used, **once)
        return out, lse

    return kernel


def _complaint(backend: VarlenBackend, shape: HeadShape) -> str | None:
    """What is wrong with what the kernel gives for runs of every size, each by itself; None if nothing is."""
    for causal in (False, True):
        reads = runs_apart(causal=causal)
        slots, queries = reads[-1].start + reads[-1].length, sum(read.queries for read in reads)
        query, keys, values = (part.to(backend.device) for part in drawn_heads(shape, queries, slots, backend.dtype))
        exact = [part.double() for part in (query.transpose(0, 1), keys, values)]
        scale = shape.head_dim**-0.5
        outs, sums = _Sequences(reads, backend).attend(query, keys, values, scale, causal=causal)
        first = 0
        for read in reads:
            own, run = slice(first, first + read.queries), slice(read.start, read.start + read.length)
            first += read.queries
            wanted, logs = matmul_attention(exact[0][:, own], exact[1][:, run], exact[2][:, run], scale, causal=causal)
            error, off = worst(outs[own], wanted.transpose(0, 1)), float((sums[own] - logs.T).abs().max())
            where = f"{'its own ' if causal else ''}{read.length} slots"
            if not error <= RELATIVE_ERROR:
                return f"over {where}, the kernel's output is off by {error:.1e} of itself"
            if not off <= SUM_ERROR:
                return f"over {where}, the kernel's log-sum-exp is off by {off:.1e}"
    return None
