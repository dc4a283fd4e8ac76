"""A step's layout as the integers that the kernel is told.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy
import torch
from numpy.typing import NDArray

from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, Read
from choreo_agents.native.library import floats
from choreo_agents.native.structs import BF16, BLOCK, FP32, PAIRINGS, TILE, PlanStruct

CHUNK = 1024
"""Slots of a chunk at most."""
QUERIES = 256
"""Pairs of a chunk at most, times the heads that share a key head."""
FEWEST_SHARED = 1 << 18
"""Products of numbers below which a second thread costs more than it does."""

Integers = NDArray[numpy.int32]


@dataclass(frozen=True)
class _Chunk:
    """Pairs are `count` of a read's, from `first` on."""

    start: int
    length: int
    first: int
    count: int


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
            readers = _readers(layout, read)
            for chunk in _cut(read, group, readers):
                chunks += (chunk.start, chunk.length, self.pairs, chunk.count)
                here = slice(chunk.first, chunk.first + chunk.count)
                tokens, shifts, lows, highs, places = (column[here] for column in readers)
                begins = chunk.start - read.start
                at = numpy.full_like(tokens, read.position + begins)
                parts = (tokens, shifts, lows - begins, highs - begins, places, at)
                for column, part in zip(columns, parts, strict=True):
                    column.append(part)
                self.pairs += chunk.count
                self.products += chunk.count * chunk.length
                self.longest = max(self.longest, chunk.count)
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


def _readers(layout: Layout, read: Read) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """A read's tokens, the shifts at which they see it, the slots that each sees: from, and behind the last; and its
    place in their views."""
    spans = read.spans
    count = read.queries
    tokens = numpy.fromiter(
        chain.from_iterable(range(span.first, span.first + span.count) for span in spans), numpy.int32, count
    )
    counts = [span.count for span in spans]
    shifts = numpy.repeat(numpy.array([span.shift for span in spans], dtype=numpy.int32), counts)
    places = numpy.repeat(numpy.array([span.place for span in spans], dtype=numpy.int32), counts)
    lows = numpy.zeros(count, dtype=numpy.int32)
    if read.window is not None:
        positions = numpy.array(layout.positions, dtype=numpy.int64)[tokens]
        lows = numpy.maximum(positions - read.window + 1 - read.position - shifts, 0).astype(numpy.int32)
    highs = numpy.full(count, read.length, dtype=numpy.int32)
    if read.causal:
        highs = numpy.arange(1, count + 1, dtype=numpy.int32)
    return tokens, shifts, lows, highs, places


def _cut(read: Read, group: int, readers: Sequence[Integers]) -> Iterator[_Chunk]:
    most = max(1, QUERIES // group)
    count = len(readers[0])
    for first in range(0, count, most):
        here = slice(first, min(count, first + most))
        low, high = int(readers[2][here].min()), int(readers[3][here].max())
        for begin in range(low - low % CHUNK, high, CHUNK):
            start, end = max(begin, low), min(begin + CHUNK, high)
            yield _Chunk(read.start + start, end - start, first, here.stop - first)


class KernelPlan:
    """All that the layers of one kind share in a step, in memory that the kernel is pointed at.

    Args:
        tasks: What is to be done.
        kind: How the layers attend.
        shape: Of the model's heads.
        dtype: Of keys, values and queries.
        threads: That share the work.
        parallel: Address of the function by which they do.
    """

    def __init__(
        self,
        tasks: Tasks,
        kind: AttentionKind,
        shape: HeadShape,
        dtype: torch.dtype,
        threads: int,
        parallel: int | None,
    ) -> None:
        tokens = len(tasks.first_part) - 1
        if tasks.products * shape.heads * shape.head_dim * 2 < FEWEST_SHARED:
            threads = 1
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
            tokens=tokens,
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
            parallel=parallel,
        )
        self.address = ctypes.addressof(self.struct)
