"""Who sees what of a read, token by token, for the plans of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from choreo_agents.attention.layout import Layout, QuerySpan, Read

Integers = NDArray[numpy.int64]


class Readers(NamedTuple):
    """A read's tokens, one entry each."""

    tokens: Integers
    shifts: Integers
    """At which they see it."""
    lows: Integers
    highs: Integers
    """Which slots each sees: from, and behind the last."""
    places: Integers
    """In their views."""


def readers_of(layout: Layout, read: Read, spans: Sequence[QuerySpan], window: int | None = None) -> Readers:
    """Those of some of a read's spans.

    Args:
        layout: Has the read.
        read: Of which.
        spans: All of a causal read's.
        window: Of the layers, if it has not cut the layout.
    """
    table = numpy.array([(span.first, span.shift, span.place) for span in spans], dtype=numpy.int64)
    counts = numpy.array([span.count for span in spans])
    table[:, 0] -= counts.cumsum() - counts  # how many tokens stand before a span's
    tokens, shifts, places = numpy.repeat(table, counts, axis=0).T
    tokens = tokens + numpy.arange(len(tokens))
    lows = numpy.zeros(len(tokens), dtype=numpy.int64)
    for hides in (window, read.window):
        if hides is not None:
            positions = numpy.array(layout.positions, dtype=numpy.int64)[tokens]
            lows = numpy.maximum(lows, positions - hides + 1 - read.position - shifts)
    highs = numpy.arange(1, len(tokens) + 1) if read.causal else numpy.full(len(tokens), read.length)
    return Readers(tokens, shifts, lows, highs, places)
