"""Plain data that describes the attention of one step: runs of slots, and the tokens that read them.

`readers_of` lists the tokens of a read with the slots that each of them sees, as columns for the plans of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


def readers_of(layout: Layout, read: Read, spans: Sequence[QuerySpan], window: int | None = None) -> Readers:
    """Return the tokens of some spans of a read.

    Args:
        layout: The layout of the read.
        read: The read.
        spans: Some of its spans; of a causal read all.
        window: Of the layers, if the layout is not cut by it.
    """
    table = numpy.array([(span.first, span.shift, span.place) for span in spans], dtype=numpy.int64)
    counts = numpy.array([span.count for span in spans])
    table[:, 0] -= counts.cumsum() - counts  # less the number of tokens in the spans before
    tokens, shifts, places = numpy.repeat(table, counts, axis=0).T
    tokens = tokens + numpy.arange(len(tokens))
    lows = numpy.zeros(len(tokens), dtype=numpy.int64)
    for hides in (window, read.window):
        if hides is not None:
            positions = numpy.array(layout.positions, dtype=numpy.int64)[tokens]
            lows = numpy.maximum(lows, positions - hides + 1 - read.position - shifts)
    highs = numpy.arange(1, len(tokens) + 1) if read.causal else numpy.full(len(tokens), read.length)
    return Readers(tokens, shifts, lows, highs, places)
