"""Attention on a GPU by the variable-length flash kernel of torch, over chunks of segments, merged.

Every chunk of at most 1,024 slots is one sequence of the kernel, with the queries of all its readers, times the heads
that share a key head, folded into its query side: KV that many rows see is read once, and a long segment is split over
the processors. The operator is called directly, by the argument names of its schema in this torch. The layout of its
results, and whether it can read slots in place, differ between releases: both are tried out before it is used.
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
from choreo_agents.attention.backends.partial import LogSumExpMerge, Partial, matmul_attention
from choreo_agents.attention.backends.trial import (
    RELATIVE_ERROR,
    SUM_ERROR,
    draw_heads,
    error_line,
    find_fault,
    runs_apart,
    worst_error,
)
from choreo_agents.attention.kind import USUAL_HEADS, AttentionKind, HeadShape
from choreo_agents.attention.layout import Layout, Read, tokens_of, windowed
from choreo_agents.attention.packing import SentTables

CHUNK = 1024
"""Upper bound on the slots of one sequence."""
_REQUIRED = frozenset(("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"))
"""Arguments that the operator must have."""

VarlenKernel = Callable[..., tuple[Tensor, Tensor]]
"""Function of (query, keys, values, starts of queries, starts of keys, longest query, longest key; by name: scale,
causal, seqused_k) to output and log-sum-exp. Raises `NotImplementedError` if `seqused_k` is given but unsupported."""


@dataclass(frozen=True)
class Dialect:
    """Conventions of the kernel that differ between its releases."""

    in_place: bool
    """True if the kernel takes keys by starts and counts, in any order; otherwise keys are gathered first."""
    heads_first: bool
    """True if the kernel returns the log-sum-exp as [heads, queries]; otherwise as [queries, heads]."""


class VarlenBackend:
    """Attention by the kernel in one of its dialects; `VarlenBackend.tried` finds out which."""

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
        """Return the backend in the first dialect that agrees with plain products in doubles, or why there is none.

        Args:
            dtype: Of keys and values.
            device: Of keys and values.
            kernel: The kernel; None: torch's.
            shape: Shape of the model's heads: kernels take some sizes only.
        """
        if dtype not in (torch.float16, torch.bfloat16):
            return f"the varlen backend supports float16 and bfloat16, not {dtype}"
        if kernel is not None:
            return _try_out.__wrapped__(dtype, device, kernel, shape)
        refused: list[str] = []
        for splits in (True, False):  # some releases have num_splits in the schema but reject it
            flash = torch_kernel(splits)
            backend = flash if isinstance(flash, str) else _try_out(dtype, device, flash, shape)
            if not isinstance(backend, str):
                return backend
            refused.append(backend)
        return "; ".join(dict.fromkeys(refused))

    def prepare(self, layout: Layout, kind: AttentionKind) -> Any:
        """Prepare a step; softcaps and masks, which the kernel does not support, go to the folded backend."""
        windowed_layout = layout if kind.window is None else windowed(layout, kind.window)
        if kind.softcap is not None or any(read.window is not None for read in windowed_layout.reads):
            return self._folded.prepare(layout, kind)
        return VarlenAttention(windowed_layout, kind, self)


@cache
def _try_out(dtype: torch.dtype, device: torch.device, kernel: VarlenKernel, shape: HeadShape) -> VarlenBackend | str:
    complaints: list[str] = []
    for in_place, heads_first in itertools.product((True, False), repeat=2):
        backend = VarlenBackend(dtype, device, kernel, Dialect(in_place, heads_first))
        try:
            complaint = _find_fault(backend, shape) or find_fault(backend, shape, dtype, device)
        except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedError among them
            complaint = error_line(error)
        if complaint is None:
            return backend
        complaints.append(complaint)
    return "varlen: " + "; ".join(dict.fromkeys(complaints))


class VarlenAttention:
    """A step's attention. Pairs are (token, chunk): first those of chunks seen whole, then those of causal runs."""

    def __init__(self, layout: Layout, kind: AttentionKind, backend: VarlenBackend) -> None:
        self.layout = layout
        whole = [chunk for read in layout.reads if not read.causal for chunk in chunks(read)]
        causal = [read for read in layout.reads if read.causal]
        self.whole = _Sequences(whole, backend) if whole else None
        self.causal = _Sequences(causal, backend) if causal else None
        spans = [span for read in (*whole, *causal) for span in read.spans]
        tokens, pair_shifts, _ = tokens_of(spans)
        arrays = {"tokens": tokens}
        self.rotation = kind.rotation if any(span.shift for span in spans) else None
        if self.rotation is not None:
            shifts, arrays["turns"] = numpy.unique(pair_shifts, return_inverse=True)
            arrays["cos"], arrays["sin"] = self.rotation.on_host(-shifts)
        packed = SentTables(arrays, backend.device)
        self.tokens = packed["tokens"]
        if self.rotation is not None:
            self.cos, self.sin = (packed[name].index_select(0, packed["turns"]) for name in ("cos", "sin"))
        self.merging = LogSumExpMerge(tokens, len(layout.positions), backend.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        pairs = query[self.tokens]
        if self.rotation is not None:
            pairs = self.rotation.apply(pairs, self.cos, self.sin)
        parts: list[Partial] = []
        first = 0
        if self.whole is not None:
            first = self.whole.queries
            parts.append(self.whole.attend(pairs[:first], keys, values, scale, causal=False))
        if self.causal is not None:
            parts.append(self.causal.attend(pairs[first:], keys, values, scale, causal=True))
        outs, lses = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        out, joint = self.merging.join(outs, lses, with_lse=sinks is not None)
        return out if sinks is None or joint is None else with_sinks(out, joint, sinks)


class _Sequences:
    """Chunks as sequences of the kernel.

    starts    [sequences + 1]   first slot of each sequence in the pool; only the kernel needs the last number
    lengths   [sequences]       slots of each sequence
    slots     [all keys]        all slots, for a kernel that cannot read in place and gets gathered keys ...
    gathered  [sequences + 1]   ... and the first index of each sequence among these
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
        """Attend from [pairs, heads, head_dim]: output of the same shape, and log-sum-exp [pairs, heads]."""
        count, heads, dim = pairs.shape
        kv_heads = keys.shape[0]
        group = 1 if causal else heads // kv_heads
        if not causal:
            pairs = pairs.view(count, kv_heads, group, dim).transpose(1, 2).reshape(count * group, kv_heads, dim)
        if self.backend.dialect.in_place:
            # `seqused_k` gives the lengths, so that starts need not ascend, nor sequences be adjacent.
            key_starts, key_counts = self.packed["starts"], self.packed["lengths"]
            sides = keys.transpose(0, 1), values.transpose(0, 1)
        else:
            key_starts, key_counts, slots = self.packed["gathered"], None, self.packed["slots"]
            sides = keys[:, slots].transpose(0, 1).contiguous(), values[:, slots].transpose(0, 1).contiguous()
        out, lse = self.backend.kernel(
            pairs.contiguous(),
            *sides,
            self._queries_from(group),
            key_starts,
            self.most_queries * group,
            self.longest,
            scale=scale,
            causal=causal,
            seqused_k=key_counts,
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
    """Cut a read into pieces of at most `CHUNK` slots."""
    return [
        Read(read.start + first, min(CHUNK, read.length - first), read.position + first, read.spans)
        for first in range(0, read.length, CHUNK)
    ]


def _offsets(lengths: NDArray[Any]) -> NDArray[Any]:
    return numpy.append(0, lengths.cumsum()).astype(numpy.int32)


@cache
def torch_kernel(splits: bool = True) -> VarlenKernel | str:
    """Return the kernel of this torch, by its operator's schema, or why there is none.

    Args:
        splits: Whether to set `num_splits=1`, if the operator takes it: how it splits sequences would depend on the
            other rows of the step.
    """
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None:
        return "varlen: this version of torch has no aten::_flash_attention_forward"
    flash = operator.default
    takes = {argument.name for argument in flash._schema.arguments}
    if not takes >= _REQUIRED:
        return f"varlen: aten::_flash_attention_forward has no {', '.join(sorted(_REQUIRED - takes))}"
    once = {"num_splits": 1} if splits and "num_splits" in takes else {}

    def kernel(*arguments: Any, scale: float, causal: bool, seqused_k: Tensor | None) -> tuple[Tensor, Tensor]:
        if seqused_k is not None and "seqused_k" not in takes:
            raise NotImplementedError("the kernel of this version of torch has no seqused_k")
        used = {} if seqused_k is None else {"seqused_k": seqused_k}
        out, lse, *_ = flash(*arguments, 0.0, causal, False, scale=scale, **used, **once)
        return out, lse

    return kernel


def _find_fault(backend: VarlenBackend, shape: HeadShape) -> str | None:
    """Compare the kernel with plain products for runs of every size; return the first fault, or None."""
    for causal in (False, True):
        reads = runs_apart(causal=causal)
        slots, queries = reads[-1].start + reads[-1].length, sum(read.queries for read in reads)
        query, keys, values = (part.to(backend.device) for part in draw_heads(shape, queries, slots, backend.dtype))
        exact = [part.double() for part in (query.transpose(0, 1), keys, values)]
        scale = shape.head_dim**-0.5
        outs, sums = _Sequences(reads, backend).attend(query, keys, values, scale, causal=causal)
        first = 0
        for read in reads:
            own, run = slice(first, first + read.queries), slice(read.start, read.start + read.length)
            first += read.queries
            target, logs = matmul_attention(exact[0][:, own], exact[1][:, run], exact[2][:, run], scale, causal=causal)
            error, off = worst_error(outs[own], target.transpose(0, 1)), float((sums[own] - logs.T).abs().max())
            where = f"{'its own ' if causal else ''}{read.length} slots"
            if not error <= RELATIVE_ERROR:
                return f"over {where}, the kernel's output has a relative error of {error:.1e}"
            if not off <= SUM_ERROR:
                return f"over {where}, the kernel's log-sum-exp is off by {off:.1e}"
    return None
