"""Attention by a kernel in C, for CPUs: one call a layer for all that a step reads, rotates and merges.

A step's layout is told it as integers:

    chunk     a run of slots, or a part of it      [first slot, slots, first pair, pairs]
    pair      a token that reads a chunk           [token, its row of angles or -1, first slot it sees, behind its last]
    part      what a pair has found there; those of a token are merged

Keys of a chunk are read once for all its pairs. Long runs are cut, so that threads share them and no sum is long, and
so are the pairs of what is read by many, so that what they find stays near the processor. Both follow from the layout
alone: what is found depends neither on threads nor on when. And as runs are cut at the same slots whoever reads them,
what a token finds is the same, bit by bit, in any company.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from choreo_agents.attention.backends.readers import Integers, Readers, readers_of
from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.window import farthest_seen, windowed
from choreo_agents.native.library import available_kernels, floats, parallel
from choreo_agents.native.structs import ATTEND, BF16, BLOCK, FP32, MERGE, PAIRINGS, TILE, LayerStruct, PlanStruct

CHUNK = 1024
"""Slots of a chunk at most."""
QUERIES = 256
"""Pairs of a chunk at most, times the heads that share a key head."""
FEWEST_SHARED = 1 << 18
"""Products of numbers below which a second thread costs more than it does."""
_DTYPES = (torch.float32, torch.bfloat16)
_WIDEST = 256
"""Dimensions of a head at most."""


class NativeBackend:
    """Attention in one call a layer. `NativeBackend.tried` says whether it can be had.

    Args:
        dtype: Of keys, values and queries.
        shape: Of the model's heads.
    """

    def __init__(self, dtype: torch.dtype, shape: HeadShape) -> None:
        kernels = available_kernels()
        assert not isinstance(kernels, str), kernels
        self.dtype = dtype
        self.kernel = next(kernel for kernel in kernels if kernel.takes(shape.head_dim))

    def __str__(self) -> str:
        return f"{type(self).__name__} for {self.kernel.name}"

    @staticmethod
    def tried(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> NativeBackend | str:
        """The backend for heads of a shape; or why there is none."""
        if device.type != "cpu":
            return f"the native kernel is for CPUs, not for {device}"
        if dtype not in _DTYPES:
            return f"the native kernel takes float32 and bfloat16, not {dtype}"
        kernels = available_kernels()
        if isinstance(kernels, str):
            return f"there is no native kernel: {kernels}"
        if shape.head_dim > _WIDEST or not any(kernel.takes(shape.head_dim) for kernel in kernels):
            return (
                f"the native kernel takes heads of a multiple of 8 dimensions up to {_WIDEST}, not of {shape.head_dim}"
            )
        return NativeBackend(dtype, shape)

    def prepare(self, layout: Layout, kind: AttentionKind) -> NativeAttention:
        farthest = 0 if kind.window is None else farthest_seen(layout)
        hides = kind.window is not None and farthest >= kind.window
        return NativeAttention(windowed(layout, kind.window or 0) if hides else layout, kind, self, farthest)


class NativeAttention:
    """One step's attention in the layers of one kind."""

    def __init__(self, layout: Layout, kind: AttentionKind, backend: NativeBackend, farthest: int = 0) -> None:
        self.layout = layout
        self.kind = kind
        self._backend = backend
        self._plans: dict[HeadShape, KernelPlan] = {}
        self._layer = LayerStruct()
        self._further, self._farthest = 0, farthest

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """See `PreparedAttention`. For one thread at a time."""
        shape = HeadShape(query.shape[1], keys.shape[0], query.shape[2])
        plan = self.plan(shape)
        assert query.dtype == keys.dtype == values.dtype == self._backend.dtype and query.device.type == "cpu"
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device="cpu")
        sinks = None if sinks is None else sinks.float().contiguous()
        layer = self._layer
        layer.query, layer.out = query.data_ptr(), out.data_ptr()
        layer.query_token, layer.query_head, _ = query.stride()
        layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        layer.pool_head, layer.pool_slot, _ = keys.stride()
        layer.sinks = None if sinks is None else sinks.data_ptr()
        layer.scale, layer.dtype = scale, BF16 if query.dtype == torch.bfloat16 else FP32
        self._backend.kernel.attend(plan.address, ctypes.addressof(layer), ATTEND | MERGE)
        return out

    def follow(self) -> bool:
        """See `PreparedAttention`."""
        self._further += 1
        if not self.layout.own:
            return False
        if self.kind.window is not None and self._farthest + self._further >= self.kind.window:
            return False  # it begins to hide what it showed
        # A plan that was not asked for yet would be that of the first step.
        return bool(self._plans) and all(plan.tasks.follow() for plan in self._plans.values())

    def plan(self, shape: HeadShape) -> KernelPlan:
        """For heads of a shape."""
        if shape not in self._plans:
            tasks = Tasks(self.layout, shape.group)
            self._plans[shape] = KernelPlan(tasks, self.kind, shape, self._backend.dtype)
        return self._plans[shape]


class Tasks:
    """Chunks, pairs and parts of a layout, for heads of a shape.

    Args:
        layout: Cut by its window.
        group: Heads that share a key head.
    """

    def __init__(self, layout: Layout, group: int) -> None:
        chunks: list[int] = []
        columns: list[list[Integers]] = [[], [], [], [], [], []]
        """Of pairs: token, shift, first slot it sees, behind its last; place in the view, position of the chunk."""
        self.longest = self.pairs = 0
        """The most pairs of a chunk; all pairs."""
        self.products = 0
        """Pairs times slots."""
        last: list[int] = []
        for read in layout.reads:
            for begins, length, readers in _cut(readers_of(layout, read, read.spans), group):
                tokens, shifts, lows, highs, places = readers
                count = len(tokens)
                chunks += (read.start + begins, length, self.pairs, count)
                at = numpy.full_like(tokens, read.position + begins)
                parts = (tokens, shifts, lows - begins, highs - begins, places, at)
                for column, part in zip(columns, parts, strict=True):
                    column.append(part)
                self.pairs += count
                self.products += count * length
                self.longest = max(self.longest, count)
            last.append(len(chunks) // 4 - 1)
        self.chunks = numpy.array(chunks, dtype=numpy.int32).reshape(-1, 4)
        token, shift, low, high, place, position = (numpy.concatenate(column) for column in columns)
        self.shifts, turns = numpy.unique(shift, return_inverse=True)
        """Distinct ones, in order: rows of angles."""
        turns = numpy.where(shift == 0, -1, turns.reshape(-1))
        self.pair = numpy.stack((token, turns, low, high), axis=1).astype(numpy.int32)
        self.part = numpy.lexsort((position, place, token)).astype(numpy.int32)
        counts = numpy.bincount(token, minlength=len(layout.positions))
        self.first_part = numpy.concatenate(([0], counts.cumsum())).astype(numpy.int32)
        own = numpy.array([last[number] for number in layout.own], dtype=numpy.int64)
        self._room = CHUNK - int(self.chunks[own, 1].max()) if layout.own else 0
        """How many slots the longest of tokens' own runs may still grow by; the chunks they end in have a pair each."""
        self._chunks_further, self._pairs_further = numpy.zeros_like(self.chunks), numpy.zeros_like(self.pair)
        self._chunks_further[own, 1] = self._pairs_further[self.chunks[own, 2], 3] = 1

    def follow(self) -> bool:
        """Let each token's own run be a slot longer; False if it cannot be."""
        if not self._room:
            return False
        self._room -= 1
        self.chunks += self._chunks_further
        self.pair += self._pairs_further
        return True


def _cut(readers: Readers, group: int) -> Iterator[tuple[int, int, Readers]]:
    """Where in a read each of its chunks begins, how many slots it has, and who sees it."""
    most = max(1, QUERIES // group)
    for first in range(0, len(readers.tokens), most):
        some = Readers(*(column[first : first + most] for column in readers))
        low, high = int(some.lows.min()), int(some.highs.max())
        for begin in range(low - low % CHUNK, high, CHUNK):
            start, end = max(begin, low), min(begin + CHUNK, high)
            yield start, end - start, some


class KernelPlan:
    """All that the layers of one kind share in a step, in memory that the kernel is pointed at.

    Args:
        tasks: What is to be done.
        kind: How the layers attend.
        shape: Of the model's heads.
        dtype: Of keys, values and queries.
    """

    def __init__(self, tasks: Tasks, kind: AttentionKind, shape: HeadShape, dtype: torch.dtype) -> None:
        are_few = tasks.products * shape.heads * shape.head_dim * 2 < FEWEST_SHARED
        threads = 1 if are_few else torch.get_num_threads()
        pair = tasks.pair
        rotation = kind.rotation
        turning = rotation is not None and bool((pair[:, 1] >= 0).any())
        if rotation is None:
            pair[:, 1] = -1
        angles = [rotation.cos_sin(torch.from_numpy(-tasks.shifts))] if rotation is not None and turning else []
        self._outs = floats(tasks.pairs, shape.heads, shape.head_dim)
        self._sums = floats(2, tasks.pairs, shape.heads)
        queries = -(-tasks.longest * shape.group // TILE) * TILE
        each = queries * 2 * (shape.head_dim + BLOCK + 1) + 2 * shape.head_dim * BLOCK
        each = -(-each // 16) * 16
        self._scratch = floats(threads, each)
        self.tasks = tasks
        self._angles = angles
        self.struct = PlanStruct(
            tokens=len(tasks.first_part) - 1,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            chunks=len(tasks.chunks),
            pairs=tasks.pairs,
            dtype=BF16 if dtype == torch.bfloat16 else FP32,
            threads=threads,
            pairing=0 if rotation is None else PAIRINGS[rotation.pairing],
            turned_from=0 if rotation is None else rotation.first,
            half=0 if rotation is None else rotation.dimensions // 2,
            softcap=0.0 if kind.softcap is None else kind.softcap,
            chunk=tasks.chunks.ctypes.data,
            pair=pair.ctypes.data,
            first_part=tasks.first_part.ctypes.data,
            part=tasks.part.ctypes.data,
            cos=angles[0][0].data_ptr() if angles else None,
            sin=angles[0][1].data_ptr() if angles else None,
            outs=self._outs.data_ptr(),
            tops=self._sums[0].data_ptr(),
            totals=self._sums[1].data_ptr(),
            scratch=self._scratch.data_ptr(),
            scratch_each=each,
            parallel=parallel(),
        )
        self.address = ctypes.addressof(self.struct)
