"""Attention by a kernel in C, for CPUs: one call per layer reads, rotates and merges everything of a step.

The kernel gets a step's layout as integers:

    chunk     a run of slots, or a part of it      [first slot, slots, first pair, pairs]
    pair      a token that reads a chunk           [token, its row of angles or -1, first slot it sees, behind its last]
    part      the partial result of a pair; those of a token are merged

Keys of a chunk are read once for all its pairs. Long runs are cut, so that threads share them and no sum is long. The
pairs of a chunk with many readers are cut, too, so that partial results stay in the cache. Both cuts follow from the
layout alone, so that results depend neither on the number of threads nor on their timing. Runs are cut at the same
slots whoever reads them, so that a token's result is the same, bit by bit, whatever else is in the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Integers, Layout, Readers, farthest_seen, readers_of, windowed
from choreo_agents.native.library import available_kernels, floats, parallel
from choreo_agents.native.structs import ATTEND, BF16, BLOCK, FP32, MERGE, PAIRINGS, TILE, LayerStruct, PlanStruct

CHUNK = 1024
"""Upper bound on the slots of a chunk."""
QUERIES = 256
"""Upper bound on the pairs of a chunk, times the heads that share a key head."""
FEWEST_SHARED = 1 << 18
"""Multiplications below which a second thread costs more than it saves."""
_DTYPES = (torch.float32, torch.bfloat16)
_WIDEST = 256
"""Upper bound on the dimensions of a head."""


class NativeBackend:
    """Attention in one call per layer. `NativeBackend.tried` returns it, or why it is not available.

    Args:
        dtype: Of keys, values and queries.
        shape: Shape of the model's heads.
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
        """Return the backend for heads of a shape, or why there is none."""
        if device.type != "cpu":
            return f"the native backend runs on CPUs only, not on {device}"
        if dtype not in _DTYPES:
            return f"the native backend supports float32 and bfloat16, not {dtype}"
        kernels = available_kernels()
        if isinstance(kernels, str):
            return f"the native backend is not available: {kernels}"
        if shape.head_dim > _WIDEST or not any(kernel.takes(shape.head_dim) for kernel in kernels):
            return (
                f"the native backend supports head dimensions in multiples of 8 up to {_WIDEST}, not {shape.head_dim}"
            )
        return NativeBackend(dtype, shape)

    def prepare(self, layout: Layout, kind: AttentionKind) -> NativeAttention:
        farthest = 0 if kind.window is None else farthest_seen(layout)
        hides = kind.window is not None and farthest >= kind.window
        return NativeAttention(windowed(layout, kind.window or 0) if hides else layout, kind, self, farthest)


class NativeAttention:
    """A step's attention for layers of one kind."""

    def __init__(self, layout: Layout, kind: AttentionKind, backend: NativeBackend, farthest: int = 0) -> None:
        self.layout = layout
        self.kind = kind
        self._backend = backend
        self._plans: dict[HeadShape, KernelPlan] = {}
        self._layer = LayerStruct()
        self._further, self._farthest = 0, farthest

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Implement `PreparedAttention`. Not thread-safe."""
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
        """Implement `PreparedAttention`."""
        self._further += 1
        if not self.layout.own:
            return False
        if self.kind.window is not None and self._farthest + self._further >= self.kind.window:
            return False  # the window begins to hide slots that the layout has
        # A plan that no layer has used yet would later be made from the first step's layout.
        return bool(self._plans) and all(plan.follow() for plan in self._plans.values())

    def plan(self, shape: HeadShape) -> KernelPlan:
        """Return the kernel's plan for heads of a shape."""
        if shape not in self._plans:
            self._plans[shape] = KernelPlan(self.layout, self.kind, shape, self._backend.dtype)
        return self._plans[shape]


class KernelPlan:
    """Chunks, pairs and parts of a layout, and the memory that the kernel writes: for all layers of a kind in a step.

    Args:
        layout: Already cut by the window.
        kind: Kind of the layers.
        shape: Shape of the model's heads.
        dtype: Of keys, values and queries.
    """

    def __init__(self, layout: Layout, kind: AttentionKind, shape: HeadShape, dtype: torch.dtype) -> None:
        chunks: list[int] = []
        columns: list[list[Integers]] = [[], [], [], [], [], []]
        """Columns of pairs: token, shift, begin and end of the slots seen, place in the view, position of the chunk."""
        pairs = longest = products = 0
        """Number of pairs, most of a chunk, and sum of pairs times slots."""
        last: list[int] = []
        for read in layout.reads:
            for begins, length, readers in _cut_chunks(readers_of(layout, read, read.spans), shape.group):
                tokens, shifts, lows, highs, places = readers
                count = len(tokens)
                chunks += (read.start + begins, length, pairs, count)
                at = numpy.full_like(tokens, read.position + begins)
                parts = (tokens, shifts, lows - begins, highs - begins, places, at)
                for column, part in zip(columns, parts, strict=True):
                    column.append(part)
                pairs += count
                products += count * length
                longest = max(longest, count)
            last.append(len(chunks) // 4 - 1)
        self._chunks = numpy.array(chunks, dtype=numpy.int32).reshape(-1, 4)
        token, shift, low, high, place, position = (numpy.concatenate(column) for column in columns)
        distinct, turns = numpy.unique(shift, return_inverse=True)  # ascending: the rows of angles
        rotation = kind.rotation
        turns = numpy.where((shift == 0) | (rotation is None), -1, turns.reshape(-1))
        self._pair = numpy.stack((token, turns, low, high), axis=1).astype(numpy.int32)
        self._part = numpy.lexsort((position, place, token)).astype(numpy.int32)
        counts = numpy.bincount(token, minlength=len(layout.positions))
        self._first_part = numpy.concatenate(([0], counts.cumsum())).astype(numpy.int32)
        own = numpy.array([last[number] for number in layout.own], dtype=numpy.int64)
        self._slots_left = CHUNK - int(self._chunks[own, 1].max()) if layout.own else 0
        """Slots by which the longest of the tokens' own runs may grow: each ends in a chunk of a single pair."""
        self._chunks_further, self._pairs_further = numpy.zeros_like(self._chunks), numpy.zeros_like(self._pair)
        self._chunks_further[own, 1] = self._pairs_further[self._chunks[own, 2], 3] = 1
        are_few = products * shape.heads * shape.head_dim * 2 < FEWEST_SHARED
        threads = 1 if are_few else torch.get_num_threads()
        turning = rotation is not None and bool((turns >= 0).any())
        self._angles = [rotation.cos_sin(torch.from_numpy(-distinct))] if rotation is not None and turning else []
        self._outs = floats(pairs, shape.heads, shape.head_dim)
        self._sums = floats(2, pairs, shape.heads)
        queries = -(-longest * shape.group // TILE) * TILE
        thread_floats = queries * 2 * (shape.head_dim + BLOCK + 1) + 2 * shape.head_dim * BLOCK
        thread_floats = -(-thread_floats // 16) * 16
        self._scratch = floats(threads, thread_floats)
        self._struct = PlanStruct(
            tokens=len(layout.positions),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            chunks=len(self._chunks),
            pairs=pairs,
            dtype=BF16 if dtype == torch.bfloat16 else FP32,
            threads=threads,
            pairing=0 if rotation is None else PAIRINGS[rotation.pairing],
            turned_from=0 if rotation is None else rotation.first,
            half=0 if rotation is None else rotation.dimensions // 2,
            softcap=0.0 if kind.softcap is None else kind.softcap,
            chunk=self._chunks.ctypes.data,
            pair=self._pair.ctypes.data,
            first_part=self._first_part.ctypes.data,
            part=self._part.ctypes.data,
            cos=self._angles[0][0].data_ptr() if self._angles else None,
            sin=self._angles[0][1].data_ptr() if self._angles else None,
            outs=self._outs.data_ptr(),
            tops=self._sums[0].data_ptr(),
            totals=self._sums[1].data_ptr(),
            scratch=self._scratch.data_ptr(),
            scratch_each=thread_floats,
            parallel=parallel(),
        )
        self.address = ctypes.addressof(self._struct)

    def follow(self) -> bool:
        """Lengthen each token's own run by a slot; return False if its chunk is full."""
        if not self._slots_left:
            return False
        self._slots_left -= 1
        self._chunks += self._chunks_further
        self._pair += self._pairs_further
        return True


def _cut_chunks(readers: Readers, group: int) -> Iterator[tuple[int, int, Readers]]:
    """Yield each chunk of a read: its first slot in the run, its length, and the tokens that see it."""
    most = max(1, QUERIES // group)
    for first in range(0, len(readers.tokens), most):
        some = Readers(*(column[first : first + most] for column in readers))
        low, high = int(some.lows.min()), int(some.highs.max())
        for begin in range(low - low % CHUNK, high, CHUNK):
            start, end = max(begin, low), min(begin + CHUNK, high)
            yield start, end - start, some
