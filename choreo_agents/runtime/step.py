"""One step as plain data: which tokens of which requests, who attends to which slots, and what each request encodes."""

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
    adapted: Mapping[str, list[int]] = field(default_factory=dict)
    """The tokens that each adapter serves."""
    mapped: tuple[Row, ...] = ()
    """Rows whose KV is made of other KV, before the pass."""
    arrivals: tuple[Arrival, ...] = ()
    """What rows read and the step brings into the pool."""
    further: int = 0
    """How many decode steps it is further than its layout, ..."""
    room: int = 0
    """... and may be at most."""

    @property
    def positions(self) -> Sequence[int]:
        """Of its tokens."""
        further = self.further
        return [at + further for at in self.layout.positions] if further else self.layout.positions


class StepMaker:
    """Makes steps, one after the other: a decode step differs from the last by a token and a slot a row, and has its
    layout. Layouts of other steps are made anew.
    """

    def __init__(self) -> None:
        self._last: Step | None = None

    def make(self, rows: Sequence[Row], arrivals: Sequence[Arrival] = ()) -> Step:
        """Pack rows one after the other."""
        last = self._last
        if last is not None and not arrivals and last.further < last.room and _follow(rows, last.rows):
            tokens = tuple([row.tokens[0] for row in rows])
            made = replace(last, rows=tuple(rows), tokens=tokens, further=last.further + 1)
        else:
            made = make_step(rows, arrivals)
            if made.layout.own and not made.arrivals:
                made = replace(made, room=_room(made))
        self._last = made
        return made


def _follow(rows: Sequence[Row], before: Sequence[Row]) -> bool:
    """Whether these are the same rows, each one sampled token further."""
    if len(rows) != len(before):
        return False
    for (number, tokens, first, _, view, samples, *_), last in zip(rows, before, strict=True):
        same = number == last.number and first == last.first + 1 and view is last.view
        if not (same and samples and len(tokens) == 1):
            return False
    return True


def _room(step: Step) -> int:
    """Steps that a layout is good for: until a row's next slot is not behind its last."""
    room: list[int] = []
    for row, slot in zip(step.rows, step.layout.write_slots, strict=True):
        [run] = [run for run in row.segment.runs if run.start <= slot < run.end]
        room.append(run.end - slot - 1)
    return min(room)


Shared = dict[tuple[int, int, int], list[QuerySpan]]
"""Who reads a run of slots: by its first slot, its length and the position of its first token."""


def make_step(rows: Sequence[Row], arrivals: Sequence[Arrival] = ()) -> Step:
    """Pack rows one after the other, and gather per run of slots all that read it."""
    positions: list[int] = []
    write_slots: list[int] = []
    wanted: list[int] = []
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
            wanted.append(at - 1)
    reads = [Read(start, length, position, tuple(spans)) for (start, length, position), spans in shared.items()]
    tokens = tuple(token for row in encoded for token in row.tokens)
    mapped = tuple(row for row in rows if row.mapper)
    alone = len(own) == len(rows) and all(len(shared[key]) == 1 for key in own)
    found = {key: number for number, key in enumerate(shared)} if alone else {}
    mine = tuple([found[key] for key in own]) if alone else ()
    layout = Layout(tuple(positions), tuple(write_slots), (*reads, *causal), mine)
    return Step(tuple(rows), tokens, layout, tuple(wanted), adapted, mapped, tuple(arrivals))


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
        _share(shared, row.segment, 0, row.first + 1, QuerySpan(at, 1, 0, len(row.view)))
        return []
    if row.first:
        _share(shared, row.segment, 0, row.first, QuerySpan(at, count, 0, len(row.view)))
    causal: list[Read] = []
    done, position = 0, row.segment.native_offset + row.first
    for run in row.segment.slots(row.first, count):
        span = QuerySpan(at + done, run.length, 0, len(row.view))
        causal.append(Read(run.start, run.length, position + done, (span,), causal=True))
        done += run.length
        if done < count:
            later = QuerySpan(at + done, count - done, 0, len(row.view))
            _share(shared, row.segment, row.first + done - run.length, run.length, later)
    return causal
