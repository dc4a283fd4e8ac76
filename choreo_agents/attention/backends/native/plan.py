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
from collections.abc import Iterator

import numpy
import torch

from choreo_agents.attention.backends.readers import Integers, Readers, readers_of
from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.native.library import floats, parallel
from choreo_agents.native.structs import BF16, BLOCK, FP32, PAIRINGS, TILE, PlanStruct

CHUNK = 1024
"""Slots of a chunk at most."""
QUERIES = 256
"""Pairs of a chunk at most, times the heads that share a key head."""
FEWEST_SHARED = 1 << 18
"""Products of numbers below which a second thread costs more than it does."""


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
