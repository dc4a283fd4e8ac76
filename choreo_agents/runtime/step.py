"""One step as plain data: which tokens of which requests, and who attends to which slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.segment import Piece, Segment


@dataclass(frozen=True)
class Row:
    """A request's share of a step."""

    number: int
    tokens: tuple[int, ...]
    first: int
    """Index of the first of these tokens in the request's own segment."""
    segment: Segment
    view: tuple[Piece, ...]
    samples: bool
    """Whether the next token is sampled after the last of these."""
    adapter: str = ""
    """Fingerprint of the adapter that encodes it; empty: the model alone."""
    mapper: str = ""
    """Fingerprint of the cache mapper that makes its KV of its view's; empty: it is encoded."""
    tenant: str = ""
    """Whose request it is."""


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    layout: Layout
    wanted: tuple[int, ...]
    """Indices of the tokens whose logits are sampled from, in the order of the rows that sample."""
    adapted: tuple[tuple[str, int, int], ...] = ()
    """Adapters, and where the tokens that each serves begin and end."""
    mapped: tuple[Row, ...] = ()
    """Rows whose KV is made of other KV, before the pass."""
    arrivals: tuple[Arrival, ...] = ()
    """What rows read and the step brings into the pool."""


Shared = dict[tuple[int, int, int], list[QuerySpan]]
"""Who reads a run of slots: by its first slot, its length and the position of its first token."""


def make_step(rows: Sequence[Row], arrivals: Sequence[Arrival] = ()) -> Step:
    """Pack rows one after the other, and gather per run of slots all that read it."""
    positions: list[int] = []
    write_slots: list[int] = []
    wanted: list[int] = []
    shared: Shared = {}
    causal: list[Read] = []
    adapted: list[tuple[str, int, int]] = []
    at = 0
    encoded = [row for row in rows if not row.mapper]
    for row in encoded:
        count = len(row.tokens)
        start = row.segment.native_offset + row.first
        positions.extend(range(start, start + count))
        for run in row.segment.slots(row.first, count):
            write_slots.extend(range(run.start, run.end))
        for piece in row.view:
            blind = max(0, piece.since - row.first)
            if blind < count:
                seeing = QuerySpan(at + blind, count - blind, piece.shift)
                _share(shared, piece.segment, piece.first, piece.count, seeing)
        causal.extend(_own_reads(row, at, shared))
        if row.adapter:
            adapted.append((row.adapter, at, at + count))
        at += count
        if row.samples:
            wanted.append(at - 1)
    reads = [Read(start, length, position, tuple(spans)) for (start, length, position), spans in shared.items()]
    tokens = tuple(token for row in encoded for token in row.tokens)
    layout = Layout(tuple(positions), tuple(write_slots), (*reads, *causal))
    mapped = tuple(row for row in rows if row.mapper)
    return Step(tuple(rows), tokens, layout, tuple(wanted), tuple(adapted), mapped, tuple(arrivals))


def _share(shared: Shared, segment: Segment, first: int, count: int, span: QuerySpan) -> None:
    """Let a span read tokens `first` to `first + count` of a segment."""
    position = segment.native_offset + first
    for run in segment.slots(first, count):
        shared.setdefault((run.start, run.length, position), []).append(span)
        position += run.length


def _own_reads(row: Row, at: int, shared: Shared) -> list[Read]:
    """What a row reads of its own segment: earlier tokens whole, this step's causally.

    slots     | earlier tokens | this step's, run 1 | this step's, run 2 |
    part 1    | whole          | causal             |                    |
    part 2    | whole          | whole              | causal             |
    """
    count = len(row.tokens)
    if count == 1:
        # A single token sees its own slot like any earlier one: nothing is left for causality.
        _share(shared, row.segment, 0, row.first + 1, QuerySpan(at, 1, 0))
        return []
    if row.first:
        _share(shared, row.segment, 0, row.first, QuerySpan(at, count, 0))
    causal: list[Read] = []
    done, position = 0, row.segment.native_offset + row.first
    for run in row.segment.slots(row.first, count):
        span = QuerySpan(at + done, run.length, 0)
        causal.append(Read(run.start, run.length, position + done, (span,), causal=True))
        done += run.length
        if done < count:
            later = QuerySpan(at + done, count - done, 0)
            _share(shared, row.segment, row.first + done - run.length, run.length, later)
    return causal
