"""The slots of a read that each token sees, as columns for the plans of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from choreo_agents.attention.layout import Layout, QuerySpan, Read

Integers = NDArray[numpy.int64]


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
