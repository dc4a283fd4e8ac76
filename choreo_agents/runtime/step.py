"""One step as plain data: which tokens of which requests, and who attends to which slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from choreo_agents.attention.layout import Layout, QuerySpan, Read
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


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    layout: Layout
    wanted: tuple[int, ...]
    """Indices of the tokens whose logits are sampled from, in the order of the rows that sample."""


def make_step(rows: Sequence[Row]) -> Step:
    """Pack rows one after the other, and gather per run of slots all that read it."""
    positions: list[int] = []
    write_slots: list[int] = []
    wanted: list[int] = []
    shared: dict[tuple[int, int], list[QuerySpan]] = {}
    causal: list[Read] = []
    at = 0
    for row in rows:
        count = len(row.tokens)
        start = row.segment.native_offset + row.first
        positions.extend(range(start, start + count))
        for run in row.segment.slots(row.first, count):
            write_slots.extend(range(run.start, run.end))
        for piece in row.view:
            for run in piece.segment.slots(piece.first, piece.count):
                shared.setdefault((run.start, run.length), []).append(QuerySpan(at, count, piece.shift))
        causal.extend(_own_reads(row, at, shared))
        at += count
        if row.samples:
            wanted.append(at - 1)
    reads = [Read(start, length, tuple(spans)) for (start, length), spans in shared.items()]
    tokens = tuple(token for row in rows for token in row.tokens)
    layout = Layout(tuple(positions), tuple(write_slots), (*reads, *causal))
    return Step(tuple(rows), tokens, layout, tuple(wanted))


def _own_reads(row: Row, at: int, shared: dict[tuple[int, int], list[QuerySpan]]) -> list[Read]:
    """What a row reads of its own segment: earlier tokens whole, this step's causally.

    slots     | earlier tokens | this step's, run 1 | this step's, run 2 |
    part 1    | whole          | causal             |                    |
    part 2    | whole          | whole              | causal             |
    """
    count = len(row.tokens)
    if count == 1:
        # A single token sees its own slot like any earlier one: nothing is left for causality.
        for run in row.segment.slots(0, row.first + 1):
            shared.setdefault((run.start, run.length), []).append(QuerySpan(at, 1, 0))
        return []
    for run in row.segment.slots(0, row.first) if row.first else []:
        shared.setdefault((run.start, run.length), []).append(QuerySpan(at, count, 0))
    causal: list[Read] = []
    done = 0
    for run in row.segment.slots(row.first, count):
        causal.append(Read(run.start, run.length, (QuerySpan(at + done, run.length, 0),), causal=True))
        done += run.length
        if done < count:
            shared.setdefault((run.start, run.length), []).append(QuerySpan(at + done, count - done, 0))
    return causal
