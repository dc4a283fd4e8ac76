"""Sliding windows: what each token of a step no longer sees is cut off its reads."""

from __future__ import annotations

from itertools import pairwise

from choreo_agents.attention.layout import Layout, QuerySpan, Read


def windowed(layout: Layout, window: int) -> Layout:
    """The layout as layers see it whose tokens see `window` positions, their own among them.

    Runs are cut where the windows of their readers begin, so that what several readers see is still read once. Where
    the tokens of one span begin at different slots, the slanted part becomes a read with a mask: the first token sees
    from slot `low` on, each later token from one slot further.

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
            low = layout.positions[span.first] - window + 1 - (read.position + span.shift)  # perhaps outside of the run
            sights.append((span, low, min(max(low + span.count - 1, 0), read.length)))
        cuts = sorted({whole for _, _, whole in sights} | {read.length})
        for low, high in pairwise(cuts):
            spans = tuple(span for span, _, whole in sights if whole <= low)
            reads.append(Read(read.start + low, high - low, read.position + low, spans))
        reads.extend(_slanted(read, *sight, window) for sight in sights if max(sight[1], 0) < sight[2])
    return Layout(layout.positions, layout.write_slots, tuple(reads))


def farthest_seen(layout: Layout) -> int:
    """At least as many positions as lie between any token and what it reads."""
    return max(layout.positions) - min(read.position + span.shift for read in layout.reads for span in read.spans)


def _slanted(read: Read, span: QuerySpan, low: int, whole: int, window: int) -> Read:
    """The slots before `whole` that only the first tokens of a span still see."""
    # Token i sees from slot low + i on: those that begin at `whole` or later see nothing of it.
    seeing = QuerySpan(span.first, min(span.count, whole - low), span.shift, span.place)
    begin = max(low, 0)
    return Read(read.start + begin, whole - begin, read.position + begin, (seeing,), window=window)
