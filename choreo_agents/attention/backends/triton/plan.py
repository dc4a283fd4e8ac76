"""A step's layout as the integers that kernels read, for all kinds of layers in one buffer.

    slots        [tokens]            slot of each token's key and value
    <kind>.few   [tiles, 5]          first slot of a chunk, begin and end of the slots read, first row, rows:
                                     tiles of rows with few queries; `many` likewise
    <kind>.pair  [pairs, 4]          token, its row of angles, begin and end of the slots that it sees
    <kind>.first [tokens + 1]        index at which each token's pairs begin in ...
    <kind>.part  [pairs]             ... the pairs of each token, in the order of its view
    <kind>.cos   [shifts, half]      fp32, of minus each shift; `sin` likewise

Slots of tiles and pairs count from the first of their chunk. A row is a pair's query in one of the heads that share a
key head. A tile holds the rows of consecutive pairs; a pair may lie in two tiles.

Tables may be larger than a step needs: the padding is tokens that are written nowhere and see nothing, and tiles
without rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.attention.backends.triton.tiles import FEW_QUERIES, Tile
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Integers, Layout, Read, Readers, readers_of
from choreo_agents.attention.packing import SentTables

_UPTO, _HIGH = 2, 3
"""Columns: the end of the slots read in a tile, and of those that a pair sees."""
NOWHERE = -1
"""Slot of a token that is not written."""
_FEWEST_TOKENS, _FEWEST_TILES, _FEWEST_PAIRS = 16, 16, 64
"""Least rounded sizes: smaller ones would not make a step cheaper."""


class KindSizes(NamedTuple):
    """Sizes of the tables of a kind."""

    few: int
    """Number of tiles of rows with few queries, ..."""
    many: int
    """... and of rows with many."""
    pairs: int
    shifts: int

    def rounded(self) -> KindSizes:
        """Round up to sizes that recur."""
        many = _power(self.many, 1) if self.many else 0
        shifts = _power(self.shifts, _FEWEST_TILES)
        return KindSizes(_power(self.few, _FEWEST_TILES), many, _power(self.pairs, _FEWEST_PAIRS), shifts)


class PlanSizes(NamedTuple):
    """Sizes of a step's tables: steps of the same sizes take the same launches."""

    tokens: int
    kinds: tuple[KindSizes, ...]

    def rounded(self) -> PlanSizes:
        """Round up to sizes that recur."""
        return PlanSizes(_power(self.tokens, _FEWEST_TOKENS), tuple(kind.rounded() for kind in self.kinds))


def _power(number: int, least: int) -> int:
    """Return the next power of two, at least `least`."""
    return max(least, 1 << (number - 1).bit_length()) if number else least


class KindPlan:
    """Tables of the layers of one kind.

    Args:
        layout: Layout of the step, not cut by windows.
        kind: Kind of the layers.
        group: Number of heads that share a key head.
        sizes: Tile sizes for rows with few queries and with many.
    """

    def __init__(self, layout: Layout, kind: AttentionKind, group: int, sizes: tuple[Tile, Tile]) -> None:
        self._tiles: tuple[list[Integers], list[Integers]] = ([], [])
        self._columns: list[Integers] = []
        """[6, some] columns of pairs: token, shift, low, high; place in the view and position of the chunk."""
        self._pairs = 0
        last: list[int] = []
        for read in layout.reads:
            for many in (False, True):
                for readers in _group_readers(layout, read, kind.window, many=many):
                    self._cut_read(read, readers, group, sizes[many], many=many)
            last.append(self._pairs - 1)
        columns = numpy.concatenate(self._columns, axis=1)
        few, many_ = (numpy.concatenate(tiles) if tiles else numpy.zeros((0, 5), numpy.int64) for tiles in self._tiles)
        tokens, shifts, lows, highs, places, positions = columns
        distinct, turns = numpy.unique(shifts, return_inverse=True)
        self.sizes = KindSizes(len(few), len(many_), len(tokens), len(distinct))
        order = numpy.lexsort((positions, places, tokens))
        counts = numpy.bincount(tokens, minlength=len(layout.positions))
        self.arrays: dict[str, NDArray[Any]] = {
            "few": few.astype(numpy.int32),
            "many": many_.astype(numpy.int32),
            "pair": numpy.stack((tokens, turns.reshape(-1), lows, highs), axis=1).astype(numpy.int32),
            "first": numpy.append(0, counts.cumsum()).astype(numpy.int32),
            "part": order.astype(numpy.int32),
        }
        if kind.rotation is not None:
            self.arrays["cos"], self.arrays["sin"] = kind.rotation.on_host(-distinct)
        self._own_pairs = numpy.array([last[number] for number in layout.own], dtype=numpy.int64)
        rows = self._own_pairs * group
        begins, counted = few[:, 3], few[:, 4]
        # A pair's rows may lie in several tiles: find all tiles that overlap them.
        overlaps = (begins[None, :] < rows[:, None] + group) & (begins[None, :] + counted[None, :] > rows[:, None])
        self._own_tiles = numpy.flatnonzero(overlaps.any(axis=0)) if layout.own else self._own_pairs
        self.steps_left = sizes[0].chunk - int(highs[self._own_pairs].max()) if layout.own else 0
        """Number of steps for which every token's own run stays in its chunk."""

    def _cut_read(self, read: Read, readers: Readers, group: int, size: Tile, *, many: bool) -> None:
        """Cut a read into chunks; those that all readers see whole are added together."""
        lowest, highest = int(readers.lows.min()), int(readers.highs.max())
        alike = _seen_whole(readers, size.chunk)
        begin = lowest - lowest % size.chunk
        while begin < highest:
            if begin == alike.start and alike:
                self._add_whole(read, readers, group, size, alike, many=many)
                begin = alike.stop
            else:
                self._add_chunk(read, readers, group, size, begin, many=many)
                begin += size.chunk

    def _add_chunk(self, read: Read, readers: Readers, group: int, size: Tile, begin: int, *, many: bool) -> None:
        """Add one chunk, for the tokens that see some of it."""
        lows = (readers.lows - begin).clip(min=0)
        highs = (readers.highs - begin).clip(max=size.chunk)
        sees = lows < highs
        if not sees.any():
            return
        lows, highs, shifts = lows[sees], highs[sees], readers.shifts[sees]
        positions, places = numpy.full_like(lows, read.position + begin), readers.places[sees]
        self._columns.append(numpy.stack((readers.tokens[sees], shifts, lows, highs, places, positions)))
        self._tiles[many].append(_tiles(read.start + begin, self._pairs, lows, highs, group, size.rows))
        self._pairs += len(lows)

    def _add_whole(self, read: Read, readers: Readers, group: int, size: Tile, begins: range, *, many: bool) -> None:
        """Add chunks that all readers see whole."""
        count, rows = len(begins), len(readers.tokens)
        chunks = numpy.array(begins)
        lows, highs = numpy.zeros(rows, dtype=numpy.int64), numpy.full(rows, size.chunk, dtype=numpy.int64)
        columns = numpy.tile(numpy.stack((readers.tokens, readers.shifts, lows, highs, readers.places)), count)
        self._columns.append(numpy.vstack((columns, numpy.repeat(read.position + chunks, rows))))
        chunk_tiles = _tiles(0, self._pairs, lows, highs, group, size.rows)
        tiles = numpy.tile(chunk_tiles, (count, 1))
        tiles[:, 0] = numpy.repeat(read.start + chunks, len(chunk_tiles))
        tiles[:, 3] += numpy.repeat(numpy.arange(count) * rows * group, len(chunk_tiles))
        self._tiles[many].append(tiles)
        self._pairs += count * rows

    def filled(self, tokens: int, sizes: KindSizes) -> dict[str, NDArray[Any]]:
        """Return the arrays, padded for a number of tokens and these sizes."""
        rows = {"few": sizes.few, "many": sizes.many, "pair": sizes.pairs, "part": sizes.pairs}
        rows |= {"cos": sizes.shifts, "sin": sizes.shifts, "first": tokens + 1}
        padded: dict[str, NDArray[Any]] = {}
        for name, array in self.arrays.items():
            padded[name] = numpy.zeros((rows[name], *array.shape[1:]), array.dtype)
            padded[name][: len(array)] = array
            if name == "first":
                padded[name][len(array) :] = array[-1]
        return padded

    def follow(self, few: NDArray[Any], pair: NDArray[Any]) -> None:
        """Lengthen each token's own run by a slot, in the host copy of the tables."""
        few[self._own_tiles, _UPTO] += 1
        pair[self._own_pairs, _HIGH] += 1


def _seen_whole(readers: Readers, chunk: int) -> range:
    """Return the first slots of the chunks of a read that all its readers see whole."""
    first, end = int(readers.lows.max()), int(readers.highs.min())
    first += -first % chunk
    return range(first, max(first, end - end % chunk), chunk)


def _tiles(start: int, first_pair: int, lows: Integers, highs: Integers, group: int, size: int) -> Integers:
    """Return a chunk's tiles, for pairs that see it from `lows` to `highs`."""
    rows = len(lows) * group
    begins = numpy.arange(0, rows, size)
    counts = (rows - begins).clip(max=size)
    first, last = begins // group, (begins + counts - 1) // group
    least, most = _reduce(numpy.minimum, lows, first, last), _reduce(numpy.maximum, highs, first, last)
    return numpy.stack((numpy.full_like(begins, start), least, most, first_pair * group + begins, counts), axis=1)


def _reduce(function: numpy.ufunc, column: Integers, first: Integers, last: Integers) -> Integers:
    """Reduce a column over each range from `first` to `last`, inclusive."""
    places = numpy.stack((first, last + 1), axis=1).reshape(-1)
    reduced: Integers = function.reduceat(numpy.append(column, column[-1]), places)[::2]
    return reduced


def _group_readers(layout: Layout, read: Read, window: int | None, *, many: bool) -> Iterator[Readers]:
    """Yield the readers of a read: all spans of few tokens together, or each span of many by itself."""
    spans = [span for span in read.spans if (span.count > FEW_QUERIES) == many]
    for together in [[span] for span in spans] if many else [spans] if spans else []:
        readers = readers_of(layout, read, together, window)
        sees = readers.lows < readers.highs
        if sees.any():
            yield Readers(*(column[sees] for column in readers))


class PlannedStep:
    """A step's layout, cut into tiles for the layers of all kinds.

    Args:
        layout: Layout of the step, not cut by windows.
        kinds: Kinds of its layers.
        shape: Shape of their heads.
        tiles: Tile sizes for rows with few queries and with many.
    """

    def __init__(
        self, layout: Layout, kinds: Sequence[AttentionKind], shape: HeadShape, tiles: tuple[Tile, Tile]
    ) -> None:
        self.layout, self.shape = layout, shape
        self.kinds = {kind: KindPlan(layout, kind, shape.group, tiles) for kind in kinds}
        self.sizes = PlanSizes(len(layout.positions), tuple(plan.sizes for plan in self.kinds.values()))

    def filled(self, sizes: PlanSizes) -> dict[str, NDArray[Any]]:
        """Return all tables, padded to `sizes`."""
        slots = numpy.full(sizes.tokens, NOWHERE, numpy.int32)
        slots[: self.sizes.tokens] = self.layout.write_slots
        tables: dict[str, NDArray[Any]] = {"slots": slots}
        for number, (plan, size) in enumerate(zip(self.kinds.values(), sizes.kinds, strict=True)):
            tables |= {f"{number}.{name}": array for name, array in plan.filled(sizes.tokens, size).items()}
        return tables


class StepPlan:
    """Tables of a step for all its layers, on a device: one buffer, sent once.

    Args:
        planned: The step.
        device: Of the tables.
        sizes: Sizes of the tables; None: those of the step.
    """

    def __init__(self, planned: PlannedStep, device: torch.device, sizes: PlanSizes | None = None) -> None:
        self.sizes = planned.sizes if sizes is None else sizes
        self.shape = planned.shape
        self._planned = planned
        self.tables = SentTables(planned.filled(self.sizes), device)
        self._numbers = {kind: number for number, kind in enumerate(planned.kinds)}
        self._scratch: tuple[Tensor, Tensor] | None = None

    def sizes_of(self, kind: AttentionKind) -> KindSizes:
        """Return the sizes of a kind's tables."""
        return self.sizes.kinds[self._numbers[kind]]

    def table(self, kind: AttentionKind, name: str) -> Tensor:
        """Return one of a kind's tables, on the device."""
        return self.tables[f"{self._numbers[kind]}.{name}"]

    def scratch(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for a layer's partial outputs, [pairs, heads, head_dim] fp32, and sums, [pairs, heads] fp32.

        All layers share it: launches are in order, so that one is done with it before the next begins.
        """
        if self._scratch is None:
            rows = max(kind.pairs for kind in self.sizes.kinds), self.shape.heads
            outs, sums = (query.new_empty(size, dtype=torch.float32) for size in ((*rows, query.shape[-1]), rows))
            self._scratch = outs, sums
        return self._scratch

    def be(self, planned: PlannedStep) -> None:
        """Load another step of the same sizes into the tables, in place."""
        self._planned = planned
        for name, array in planned.filled(self.sizes).items():
            self.tables.host[name][...] = array
        self.tables.send()

    def follow(self) -> bool:
        """Advance to the next step, each token's own run a slot longer; return False if a chunk is full."""
        plans = self._planned.kinds
        if any(plan.steps_left < 1 for plan in plans.values()):
            return False
        host = self.tables.host
        host["slots"][: self._planned.sizes.tokens] += 1
        for number, plan in enumerate(plans.values()):
            plan.steps_left -= 1
            plan.follow(host[f"{number}.few"], host[f"{number}.pair"])
        self.tables.send()
        return True
