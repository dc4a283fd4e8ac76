"""A step as plain data: the tokens of each request, the slots that they attend to, and what each request encodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.kv.copying import Arrival
from choreo_agents.kv.segment import Piece, Segment


class Row(NamedTuple):
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
    """Fingerprint of the adapter that encodes it; empty: the base model."""
    mapper: str = ""
    """Fingerprint of the cache mapper that computes its KV from its view's; empty: it is encoded."""
    tenant: str = ""
    """Tenant of the request."""


@dataclass(frozen=True)
class Step:
    """A forward pass as plain data."""

    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    layout: Layout
    logits_at: tuple[int, ...]
    """Indices of the tokens whose logits are sampled from, in the order of the rows that sample."""
    adapted: Mapping[str, list[int]] = field(default_factory=dict)
    """Indices of the tokens of each adapter, by its fingerprint."""
    mapped: tuple[Row, ...] = ()
    """Rows whose KV is mapped from other KV, before the pass."""
    arrivals: tuple[Arrival, ...] = ()
    """KV that rows read and the step brings into the pool."""
    further: int = 0
    """Number of decode steps since its layout was made, ..."""
    room: int = 0
    """... and the most that the layout is good for."""

    @property
    def positions(self) -> Sequence[int]:
        """Positions of its tokens."""
        further = self.further
        return [at + further for at in self.layout.positions] if further else self.layout.positions


class StepMaker:
    """Makes steps in sequence. A decode step differs from the last by one token and one slot per row, and shares its
    layout; other steps get a new layout."""

    def __init__(self) -> None:
        self._last: Step | None = None

    def make(self, rows: Sequence[Row], arrivals: Sequence[Arrival] = ()) -> Step:
        """Pack rows into a step."""
        last = self._last
        if last is not None and not arrivals and last.further < last.room and _are_next_tokens(rows, last.rows):
            tokens = tuple([row.tokens[0] for row in rows])
            step = replace(last, rows=tuple(rows), tokens=tokens, further=last.further + 1)
        else:
            step = make_step(rows, arrivals)
            if step.layout.own and not step.arrivals:
                step = replace(step, room=_steps_left(step))
        self._last = step
        return step


def _are_next_tokens(rows: Sequence[Row], before: Sequence[Row]) -> bool:
    """Return whether these are the same rows, each one sampled token later."""
    if len(rows) != len(before):
        return False
    for (number, tokens, first, _, view, samples, *_), last in zip(rows, before, strict=True):
        same = number == last.number and first == last.first + 1 and view is last.view
        if not (same and samples and len(tokens) == 1):
            return False
    return True


def _steps_left(step: Step) -> int:
    """Return the number of steps that a layout stays valid for: until a row's next slot would not follow its last."""
    room: list[int] = []
    for row, slot in zip(step.rows, step.layout.write_slots, strict=True):
        [run] = [run for run in row.segment.runs if run.start <= slot < run.end]
        room.append(run.end - slot - 1)
    return min(room)


Shared = dict[tuple[int, int, int], list[QuerySpan]]
"""Readers of each run of slots, by its first slot, its length and the position of its first token."""


def make_step(rows: Sequence[Row], arrivals: Sequence[Arrival] = ()) -> Step:
    """Pack rows into a new step, and gather for each run of slots all that read it."""
    positions: list[int] = []
    write_slots: list[int] = []
    logits_at: list[int] = []
    shared: Shared = {}
    causal: list[Read] = []
    own: list[tuple[int, int, int]] = []
    adapted: dict[str, list[int]] = {}
    at = 0
    encoded = [row for row in rows if not row.mapper]
    for row in encoded:
        count = len(row.tokens)
        start = row.segment.native_offset + row.first
        positions.extend(range(start, start + count))
        for run in row.segment.slots(row.first, count):
            write_slots.extend(range(run.start, run.end))
        for place, piece in enumerate(row.view):
            _share(shared, piece.segment, piece.first, piece.count, QuerySpan(at, count, piece.shift, place))
        causal.extend(_own_reads(row, at, shared))
        if count == 1 and row.samples:
            last = row.segment.slots(0, row.first + 1)[-1]
            own.append((last.start, last.length, start + 1 - last.length))
        if row.adapter:
            adapted.setdefault(row.adapter, []).extend(range(at, at + count))
        at += count
        if row.samples:
            logits_at.append(at - 1)
    reads = [Read(start, length, position, tuple(spans)) for (start, length, position), spans in shared.items()]
    tokens = tuple(token for row in encoded for token in row.tokens)
    mapped = tuple(row for row in rows if row.mapper)
    alone = len(own) == len(rows) and all(len(shared[key]) == 1 for key in own)
    index_of = {key: number for number, key in enumerate(shared)} if alone else {}
    own_reads = tuple([index_of[key] for key in own]) if alone else ()
    layout = Layout(tuple(positions), tuple(write_slots), (*reads, *causal), own_reads)
    return Step(tuple(rows), tokens, layout, tuple(logits_at), adapted, mapped, tuple(arrivals))


def _share(shared: Shared, segment: Segment, first: int, count: int, span: QuerySpan) -> None:
    """Let a span read tokens `first` to `first + count` of a segment."""
    position = segment.native_offset + first
    for run in segment.slots(first, count):
        shared.setdefault((run.start, run.length, position), []).append(span)
        position += run.length


def _own_reads(row: Row, at: int, shared: Shared) -> list[Read]:
    """Return what a row reads of its own segment: earlier tokens in full, this step's causally.

    slots     | earlier tokens | this step's, run 1 | this step's, run 2 |
    part 1    | whole          | causal             |                    |
    part 2    | whole          | whole              | causal             |
    """
    count = len(row.tokens)
    if count == 1:
        # A single token reads its own slot like any earlier one: no causal read is needed.
        _share(shared, row.segment, 0, row.first + 1, QuerySpan(at, 1, 0, len(row.view)))
        return []
    if row.first:
        _share(shared, row.segment, 0, row.first, QuerySpan(at, count, 0, len(row.view)))
    causal: list[Read] = []
    offset, position = 0, row.segment.native_offset + row.first
    for run in row.segment.slots(row.first, count):
        span = QuerySpan(at + offset, run.length, 0, len(row.view))
        causal.append(Read(run.start, run.length, position + offset, (span,), causal=True))
        offset += run.length
        if offset < count:
            later = QuerySpan(at + offset, count - offset, 0, len(row.view))
            _share(shared, row.segment, row.first + offset - run.length, run.length, later)
    return causal
