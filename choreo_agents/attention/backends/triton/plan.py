"""A step's layout as the integers that the kernels are told, for all kinds of layers in one buffer.

    slots        [tokens]            where each token's key and value are written
    <kind>.few   [tiles, 5]          first slot of a chunk, from where to where of it is read, first row, rows:
                                     tiles of rows with few queries; `many` likewise
    <kind>.pair  [pairs, 4]          token, its row of angles, the first slot that it sees, the one behind the last
    <kind>.first [tokens + 1]        where each token's parts begin in ...
    <kind>.part  [pairs]             ... the pairs of each token, in the order in which it sees them
    <kind>.cos   [shifts, half]      fp32, as is `sin`: of minus each shift

Slots of a tile and of pairs count from the chunk's first. A row is a pair's query in one of the heads that share a key
head: rows of a tile are those of pairs one after the other, and a pair may lie in two tiles.

Tables may be larger than a step fills them: the rest are tokens that are written nowhere and see nothing, and tiles
without rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from choreo_agents.attention.backends.readers import Integers, Readers, readers_of
from choreo_agents.attention.backends.triton.tiles import FEW_QUERIES, Tile
from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, Read
from choreo_agents.attention.packing import SentTables

_UPTO, _HIGH = 2, 3
"""Columns of a tile and of a pair."""
NOWHERE = -1
"""The slot of a token that is not written."""
_FEWEST_TOKENS, _FEWEST_TILES, _FEWEST_PAIRS = 16, 16, 64
"""Of rounded sizes: what lies below costs a step as much."""


class KindSizes(NamedTuple):
    """How much the tables of a kind hold."""

    few: int
    """Tiles of rows with few queries, ..."""
    many: int
    """... and of those with many."""
    pairs: int
    shifts: int

    def rounded(self) -> KindSizes:
        """At least as much, in sizes that recur."""
        many = _power(self.many, 1) if self.many else 0
        shifts = _power(self.shifts, _FEWEST_TILES)
        return KindSizes(_power(self.few, _FEWEST_TILES), many, _power(self.pairs, _FEWEST_PAIRS), shifts)


class PlanSizes(NamedTuple):
    """How much a step's tables hold: steps of the same sizes take the same launches."""

    tokens: int
    kinds: tuple[KindSizes, ...]

    def rounded(self) -> PlanSizes:
        """At least as much, in sizes that recur."""
        return PlanSizes(_power(self.tokens, _FEWEST_TOKENS), tuple(kind.rounded() for kind in self.kinds))


def _power(number: int, least: int) -> int:
    """The next power of two, but not below `least`."""
    return max(least, 1 << (number - 1).bit_length()) if number else least


class KindPlan:
    """What the layers of one kind are told, for heads of a group.

    Args:
        layout: Of the step; windows have not cut it.
        kind: Of the layers.
        group: Heads that share a key head.
        sizes: Of tiles, for rows with few queries and with many.
    """

    def __init__(self, layout: Layout, kind: AttentionKind, group: int, sizes: tuple[Tile, Tile]) -> None:
        self._tiles: tuple[list[Integers], list[Integers]] = ([], [])
        self._columns: list[Integers] = []
        """Of pairs: token, shift, low, high, and of what they see place in the view and position: [6, some]."""
        self._pairs = 0
        last: list[int] = []
        for read in layout.reads:
            for many in (False, True):
                for readers in _readers(layout, read, kind.window, many=many):
                    self._cut(read, readers, group, sizes[many], many=many)
            last.append(self._pairs - 1)
        columns = numpy.concatenate(self._columns, axis=1)
        few, many_ = (numpy.concatenate(each) if each else numpy.zeros((0, 5), numpy.int64) for each in self._tiles)
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
        # Its tile is the last that begins at its first row or before; with large groups more of them follow.
        held = (begins[None, :] < rows[:, None] + group) & (begins[None, :] + counted[None, :] > rows[:, None])
        self._own_tiles = numpy.flatnonzero(held.any(axis=0)) if layout.own else self._own_pairs
        self.room = sizes[0].chunk - int(highs[self._own_pairs].max()) if layout.own else 0
        """Steps for which every token's own run stays in its chunk."""

    def _cut(self, read: Read, readers: Readers, group: int, size: Tile, *, many: bool) -> None:
        """Cut a read into chunks: those that all see whole are alike."""
        lowest, highest = int(readers.lows.min()), int(readers.highs.max())
        alike = _seen_whole(readers, size.chunk)
        begin = lowest - lowest % size.chunk
        while begin < highest:
            if begin == alike.start and alike:
                self._put_alike(read, readers, group, size, alike, many=many)
                begin = alike.stop
            else:
                self._put(read, readers, group, size, begin, many=many)
                begin += size.chunk

    def _put(self, read: Read, readers: Readers, group: int, size: Tile, begin: int, *, many: bool) -> None:
        """One chunk, for those that see some of it."""
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

    def _put_alike(self, read: Read, readers: Readers, group: int, size: Tile, begins: range, *, many: bool) -> None:
        """Chunks that all see whole."""
        count, rows = len(begins), len(readers.tokens)
        chunks = numpy.array(begins)
        lows, highs = numpy.zeros(rows, dtype=numpy.int64), numpy.full(rows, size.chunk, dtype=numpy.int64)
        columns = numpy.tile(numpy.stack((readers.tokens, readers.shifts, lows, highs, readers.places)), count)
        self._columns.append(numpy.vstack((columns, numpy.repeat(read.position + chunks, rows))))
        one = _tiles(0, self._pairs, lows, highs, group, size.rows)
        made = numpy.tile(one, (count, 1))
        made[:, 0] = numpy.repeat(read.start + chunks, len(one))
        made[:, 3] += numpy.repeat(numpy.arange(count) * rows * group, len(one))
        self._tiles[many].append(made)
        self._pairs += count * rows

    def filled(self, tokens: int, sizes: KindSizes) -> dict[str, NDArray[Any]]:
        """The arrays, as large as they have to be for so many tokens and for these sizes."""
        rows = {"few": sizes.few, "many": sizes.many, "pair": sizes.pairs, "part": sizes.pairs}
        rows |= {"cos": sizes.shifts, "sin": sizes.shifts, "first": tokens + 1}
        made: dict[str, NDArray[Any]] = {}
        for name, array in self.arrays.items():
            made[name] = numpy.zeros((rows[name], *array.shape[1:]), array.dtype)
            made[name][: len(array)] = array
            if name == "first":
                made[name][len(array) :] = array[-1]
        return made

    def follow(self, few: NDArray[Any], pair: NDArray[Any]) -> None:
        """Let each token's own run be a slot longer, in the tables as they are sent."""
        few[self._own_tiles, _UPTO] += 1
        pair[self._own_pairs, _HIGH] += 1


def _seen_whole(readers: Readers, chunk: int) -> range:
    """Where the chunks of a read begin that all its readers see whole."""
    first, end = int(readers.lows.max()), int(readers.highs.min())
    first += -first % chunk
    return range(first, max(first, end - end % chunk), chunk)


def _tiles(start: int, first_pair: int, lows: Integers, highs: Integers, group: int, size: int) -> Integers:
    """A chunk's tiles, for pairs that see it from `lows` to `highs`."""
    rows = len(lows) * group
    begins = numpy.arange(0, rows, size)
    counts = (rows - begins).clip(max=size)
    first, last = begins // group, (begins + counts - 1) // group
    least, most = _over(numpy.minimum, lows, first, last), _over(numpy.maximum, highs, first, last)
    return numpy.stack((numpy.full_like(begins, start), least, most, first_pair * group + begins, counts), axis=1)


def _over(function: numpy.ufunc, column: Integers, first: Integers, last: Integers) -> Integers:
    """A column reduced from `first` to `last`, both counted, for each of them."""
    places = numpy.stack((first, last + 1), axis=1).reshape(-1)
    found: Integers = function.reduceat(numpy.append(column, column[-1]), places)[::2]
    return found


def _readers(layout: Layout, read: Read, window: int | None, *, many: bool) -> Iterator[Readers]:
    """Who sees some of a read: its spans of few tokens together, or each of those of many by itself."""
    spans = [span for span in read.spans if (span.count > FEW_QUERIES) == many]
    for together in [[span] for span in spans] if many else [spans] if spans else []:
        readers = readers_of(layout, read, together, window)
        sees = readers.lows < readers.highs
        if sees.any():
            yield Readers(*(column[sees] for column in readers))


class PlannedStep:
    """A step's layout, cut into tiles for the layers of all kinds.

    Args:
        layout: Of the step; windows have not cut it.
        kinds: Of its layers.
        shape: Of their heads.
        tiles: Their sizes.
    """

    def __init__(
        self, layout: Layout, kinds: Sequence[AttentionKind], shape: HeadShape, tiles: tuple[Tile, Tile]
    ) -> None:
        self.layout, self.shape = layout, shape
        self.kinds = {kind: KindPlan(layout, kind, shape.group, tiles) for kind in kinds}
        self.sizes = PlanSizes(len(layout.positions), tuple(plan.sizes for plan in self.kinds.values()))

    def filled(self, sizes: PlanSizes) -> dict[str, NDArray[Any]]:
        """All tables, as large as `sizes` says."""
        slots = numpy.full(sizes.tokens, NOWHERE, numpy.int32)
        slots[: self.sizes.tokens] = self.layout.write_slots
        made: dict[str, NDArray[Any]] = {"slots": slots}
        for number, (plan, size) in enumerate(zip(self.kinds.values(), sizes.kinds, strict=True)):
            made |= {f"{number}.{name}": array for name, array in plan.filled(sizes.tokens, size).items()}
        return made


class StepPlan:
    """What all layers of a step are told: one buffer, sent once.

    Args:
        planned: The step.
        device: That is told.
        sizes: Of the tables; None: as large as the step has to have them.
    """

    def __init__(self, planned: PlannedStep, device: torch.device, sizes: PlanSizes | None = None) -> None:
        self.sizes = planned.sizes if sizes is None else sizes
        self.shape = planned.shape
        self._planned = planned
        self.tables = SentTables(planned.filled(self.sizes), device)
        self._numbers = {kind: number for number, kind in enumerate(planned.kinds)}
        self._scratch: tuple[Tensor, Tensor] | None = None

    def sizes_of(self, kind: AttentionKind) -> KindSizes:
        """Of a kind's tables."""
        return self.sizes.kinds[self._numbers[kind]]

    def table(self, kind: AttentionKind, name: str) -> Tensor:
        """One of a kind's tables, on the device."""
        return self.tables[f"{self._numbers[kind]}.{name}"]

    def scratch(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's pairs find, [pairs, heads, head_dim] fp32, and its weight, [pairs, heads] fp32.

        All layers have the same: one is done with it before the next begins.
        """
        if self._scratch is None:
            rows = max(kind.pairs for kind in self.sizes.kinds), self.shape.heads
            outs, sums = (query.new_empty(size, dtype=torch.float32) for size in ((*rows, query.shape[-1]), rows))
            self._scratch = outs, sums
        return self._scratch

    def be(self, planned: PlannedStep) -> None:
        """Be that of another step that fits into the tables; they stay where they are."""
        self._planned = planned
        for name, array in planned.filled(self.sizes).items():
            self.tables.host[name][...] = array
        self.tables.send()

    def follow(self) -> bool:
        """Be that of the next step, in which each token's own run is a slot longer; False if it cannot be."""
        plans = self._planned.kinds
        if any(plan.room < 1 for plan in plans.values()):
            return False
        host = self.tables.host
        host["slots"][: self._planned.sizes.tokens] += 1
        for number, plan in enumerate(plans.values()):
            plan.room -= 1
            plan.follow(host[f"{number}.few"], host[f"{number}.pair"])
        self.tables.send()
        return True
