"""Plain data that describes the attention of one step: runs of slots, and the tokens that read them.

`readers_of` lists the tokens of a read with the slots that each of them sees, as columns for the plans of kernels.
`windowed` cuts from a step's reads the slots that a sliding window hides from their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

Integers = NDArray[numpy.int64]


@dataclass(frozen=True)
class QuerySpan:
    """Consecutive tokens of a step that read a run of slots shifted by `shift` positions."""

    first: int
    count: int
    shift: int
    place: int = field(default=0, compare=False)
    """Index of the run in the tokens' view. Partial results are summed in this order, so that sums do not depend on
    other readers or on where runs lie in the pool."""


@dataclass(frozen=True)
class Read:
    """A run of slots and all tokens that read it in this step: it is read once for all of them.

    `position` is where the first slot's token was encoded, the next ones follow; a span sees them `shift` further.
    `causal` marks the tokens' own run: one span without shift, as many slots as tokens, each seeing up to itself.
    `window` hides from each token the slots that lie `window` or more positions before it; every token of the spans
    still sees at least one slot.
    """

    start: int
    length: int
    position: int
    spans: tuple[QuerySpan, ...]
    causal: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.length > 0, "empty runs crash the attention kernel: leave them out"
        assert all(span.count > 0 for span in self.spans)
        if self.causal:
            assert len(self.spans) == 1 and self.spans[0].count == self.length and self.spans[0].shift == 0

    @property
    def queries(self) -> int:
        return sum(span.count for span in self.spans)


@dataclass(frozen=True)
class Layout:
    """Attention of one step: positions and slots of its tokens, and the runs that they read.

        token       0    1    2    3          positions, write_slots: one entry a token
        reads       [slots 0-31: tokens 0, 1-2 (shifted by 7)]  [slots 64-66: token 3]  ...

    A token's view is the union of the reads whose spans hold it; each token reads at least its own slot. The tokens
    of a span have consecutive positions.
    """

    positions: tuple[int, ...]
    write_slots: tuple[int, ...]
    reads: tuple[Read, ...]
    own: tuple[int, ...] = field(default=(), compare=False)
    """For each token, the index in `reads` of the run that ends in its slot. Empty unless every token is of a row that
    decodes and no other token reads that run."""

    def grown(self, steps: int) -> Layout:
        """Return the layout `steps` decode steps later: each row has moved on by one position and slot per step."""
        if not steps:
            return self
        assert self.own
        reads = list(self.reads)
        for number in self.own:
            reads[number] = replace(reads[number], length=reads[number].length + steps)
        positions = tuple(position + steps for position in self.positions)
        return Layout(positions, tuple(slot + steps for slot in self.write_slots), tuple(reads), self.own)

    def slots_read_by(self, readers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return by reader the slots that are read, each run once, and those read if no two spans shared a run.

        Args:
            readers: The reader to whom each token is counted. No run is read by two of them.
        """
        slots: dict[str, tuple[int, int]] = {}
        for read in self.reads:
            reader = readers[read.spans[0].first]
            shared, alone = slots.get(reader, (0, 0))
            slots[reader] = (shared + read.length, alone + read.length * len(read.spans))
        return slots


class Readers(NamedTuple):
    """The tokens of a read, one entry each."""

    tokens: Integers
    shifts: Integers
    """Shift at which each token sees the run."""
    lows: Integers
    highs: Integers
    """Slots that each token sees: from `lows` up to, not including, `highs`."""
    places: Integers
    """Index of the run in each token's view."""


def tokens_of(spans: Sequence[QuerySpan]) -> tuple[Integers, Integers, Integers]:
    """Return the tokens of some spans, with their shifts and the indices of runs in their views."""
    table = numpy.array([(span.first, span.shift, span.place) for span in spans], dtype=numpy.int64)
    counts = numpy.array([span.count for span in spans])
    table[:, 0] -= counts.cumsum() - counts  # less the number of tokens in the spans before
    tokens, shifts, places = numpy.repeat(table, counts, axis=0).T
    return tokens + numpy.arange(len(tokens)), shifts, places


def readers_of(layout: Layout, read: Read, spans: Sequence[QuerySpan], window: int | None = None) -> Readers:
    """Return the tokens of some spans of a read.

    Args:
        layout: The layout of the read.
        read: The read.
        spans: Some of its spans; of a causal read all.
        window: Of the layers, if the layout is not cut by it.
    """
    tokens, shifts, places = tokens_of(spans)
    lows = numpy.zeros(len(tokens), dtype=numpy.int64)
    for hides in (window, read.window):
        if hides is not None:
            positions = numpy.array(layout.positions, dtype=numpy.int64)[tokens]
            lows = numpy.maximum(lows, positions - hides + 1 - read.position - shifts)
    highs = numpy.arange(1, len(tokens) + 1) if read.causal else numpy.full(len(tokens), read.length)
    return Readers(tokens, shifts, lows, highs, places)


def windowed(layout: Layout, window: int) -> Layout:
    """Return the layout for layers whose tokens see `window` positions, including their own.

    Runs are cut where the windows of their readers begin, so that slots of several readers are still read once. The
    tokens of one span begin at different slots: this slanted part becomes a read with a mask. The first token sees
    slots from `low` on, each later token from one slot further.

        slots     0 . . low . . whole . . . length
        token 0   hidden   | sees ...
        last      hidden               | sees ...
                           |  slanted  |  whole: seen by all
    """
    reads: list[Read] = []
    for read in layout.reads:
        if read.causal:
            hides = window if read.length > window else None
            reads.append(Read(read.start, read.length, read.position, read.spans, True, hides))
            continue
        sights: list[tuple[QuerySpan, int, int]] = []
        for span in read.spans:
            low = layout.positions[span.first] - window + 1 - (read.position + span.shift)  # may lie outside the run
            sights.append((span, low, min(max(low + span.count - 1, 0), read.length)))
        cuts = sorted({whole for _, _, whole in sights} | {read.length})
        for low, high in pairwise(cuts):
            spans = tuple(span for span, _, whole in sights if whole <= low)
            reads.append(Read(read.start + low, high - low, read.position + low, spans))
        reads.extend(_masked_read(read, *sight, window) for sight in sights if max(sight[1], 0) < sight[2])
    return Layout(layout.positions, layout.write_slots, tuple(reads))


def farthest_seen(layout: Layout) -> int:
    """Return an upper bound on the positions between any token and a slot that it reads."""
    return max(layout.positions) - min(read.position + span.shift for read in layout.reads for span in read.spans)


def _masked_read(read: Read, span: QuerySpan, low: int, whole: int, window: int) -> Read:
    """Return the read of the slots before `whole`, which only the first tokens of a span still see."""
    # Token i sees slots from low + i on: tokens that begin at `whole` or later see none of these.
    seeing = QuerySpan(span.first, min(span.count, whole - low), span.shift, span.place)
    begin = max(low, 0)
    return Read(read.start + begin, whole - begin, read.position + begin, (seeing,), window=window)
