"""Sliding windows: cuts from a step's reads the slots that their tokens no longer see."""

from __future__ import annotations

from itertools import pairwise

from choreo_agents.attention.layout import Layout, QuerySpan, Read


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
