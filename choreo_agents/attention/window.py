"""Sliding windows: what each token of a step no longer sees is cut off its reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from choreo_agents.attention.layout import Layout, QuerySpan, Read


@dataclass(frozen=True)
class _Sight:
    """What a span sees of a run: its first token from slot `low` on, each later token from one slot further.

    slots     0 . . low . . low + count - 1 . . . length
    token 0   hidden   | sees ...
    last      hidden               | sees ...
                       |  slanted  |  whole: seen by all
    """

    span: QuerySpan
    low: int
    length: int

    @property
    def whole_from(self) -> int:
        """The first slot that all tokens of the span see."""
        return min(max(self.low + self.span.count - 1, 0), self.length)


def windowed(layout: Layout, window: int) -> Layout:
    """The layout as layers see it whose tokens see `window` positions, their own among them.

    Runs are cut where the windows of their readers begin, so that what several readers see is still read once. Where
    the tokens of one span begin at different slots, the slanted part becomes a read with a mask.
    """
    reads: list[Read] = []
    for read in layout.reads:
        if read.causal:
            hides = window if read.length > window else None
            reads.append(Read(read.start, read.length, read.position, read.spans, True, hides))
            continue
        # The first slot that the first token of each span sees; it may lie outside of the run.
        lows = [layout.positions[span.first] - window + 1 - (read.position + span.shift) for span in read.spans]
        sights = [_Sight(span, low, read.length) for span, low in zip(read.spans, lows, strict=True)]
        cuts = sorted({sight.whole_from for sight in sights} | {read.length})
        for low, high in pairwise(cuts):
            spans = tuple(sight.span for sight in sights if sight.whole_from <= low)
            reads.append(Read(read.start + low, high - low, read.position + low, spans))
        reads.extend(slanted for sight in sights if (slanted := _slanted(read, sight, window)) is not None)
    return Layout(layout.positions, layout.write_slots, tuple(reads))


def farthest_seen(layout: Layout) -> int:
    """At least as many positions as lie between any token and what it reads."""
    return max(layout.positions) - min(read.position + span.shift for read in layout.reads for span in read.spans)


def _slanted(read: Read, sight: _Sight, window: int) -> Read | None:
    """The slots that only the first tokens of a span still see."""
    low, high = max(sight.low, 0), sight.whole_from
    if low >= high:
        return None
    # Token i sees from slot sight.low + i on: those that begin at `high` or later see nothing of it.
    count = min(sight.span.count, high - sight.low)
    span = QuerySpan(sight.span.first, count, sight.span.shift, sight.span.place)
    return Read(read.start + low, high - low, read.position + low, (span,), window=window)
