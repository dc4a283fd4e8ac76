"""Decode steps that keep their layout are those that are made anew: in words of the layout, and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.attention.backends import AttentionBackend
from choreo_agents.attention.backends import native as plan
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.rope import PureRotation
from choreo_agents.attention.step import StepAttention
from choreo_agents.kv.blocks import Run
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Piece, Segment
from choreo_agents.native.library import available_kernels
from choreo_agents.runtime.step import Row, StepMaker, make_step

BLOCK, BLOCKS = 5, 12
HEADS = HeadShape(4, 2, 16)
ROTATION = PureRotation(1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16))
KINDS = (AttentionKind(ROTATION), AttentionKind(ROTATION, window=9))
CPU = torch.device("cpu")


@st.composite
def decodes(draw: st.DrawFn) -> list[list[Row]]:
    """The rows of steps, one after the other: decodes that begin, read each other's past, pause and end."""
    blocks = iter(draw(st.permutations(range(BLOCKS))))
    segments = [
        Segment(
            tuple(Run(BLOCK * next(blocks), BLOCK) for _ in range(draw(st.integers(1, 3)))), draw(st.integers(0, 30))
        )
        for _ in range(4)
    ]
    read, filled = segments[:2], segments[2:]
    views: list[tuple[Piece, ...]] = [
        tuple(
            Piece(each, 0, draw(st.integers(1, each.capacity)), draw(st.integers(0, 30)))
            for each in draw(st.lists(st.sampled_from(read), max_size=3))
        )
        for _ in filled
    ]
    firsts = [draw(st.integers(0, 3)) for _ in filled]
    steps: list[list[Row]] = []
    for _ in range(draw(st.integers(1, 14))):
        rows = []
        for number, (segment, view) in enumerate(zip(filled, views, strict=True)):
            left = segment.capacity - firsts[number]
            if not left or draw(st.integers(0, 9)) == 0:
                continue
            count = 1 if draw(st.integers(0, 9)) else draw(st.integers(1, left))
            tokens = tuple(range(100 * number + firsts[number], 100 * number + firsts[number] + count))
            rows.append(Row(number, tokens, firsts[number], segment, view, count == 1 or draw(st.booleans())))
            firsts[number] += count
        if rows:
            steps.append(rows)
    return steps


@given(decodes())
def test_a_step_that_keeps_its_layout_is_the_step_that_is_made_anew(steps: list[list[Row]]) -> None:
    maker = StepMaker()
    for rows in steps:
        kept, anew = maker.make(rows), make_step(rows)
        layout = kept.layout.grown(kept.further)
        assert layout == anew.layout and [*kept.positions] == [*anew.layout.positions]
        assert (kept.rows, kept.tokens, kept.logits_at) == (anew.rows, anew.tokens, anew.logits_at)


def backends() -> Iterator[AttentionBackend]:
    yield FoldedBackend(torch.float32, CPU)
    if not isinstance(available_kernels(), str):
        yield NativeBackend(torch.float32, HEADS)


@pytest.mark.parametrize("backend", [*backends()], ids=lambda backend: type(backend).__name__)
@given(steps=decodes(), chunk=st.sampled_from([4, 1024]))
def test_its_attention_is_bit_by_bit_that_which_is_prepared_anew(
    backend: AttentionBackend, steps: list[list[Row]], chunk: int
) -> None:
    geometry = KVGeometry(len(KINDS), HEADS.kv_heads, HEADS.head_dim, torch.float32)
    pool = KVPool(geometry, BLOCK * BLOCKS * geometry.bytes_per_token, CPU, BLOCK)
    generator = torch.Generator().manual_seed(0)
    for layer in (*pool.keys, *pool.values):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    maker, kept = StepMaker(), None
    with patch.object(plan, "CHUNK", chunk):
        for rows in steps:
            step = maker.make(rows)
            query = torch.randn(len(step.tokens), HEADS.heads, HEADS.head_dim, generator=generator)
            new = torch.randn(2, HEADS.kv_heads, len(step.tokens), HEADS.head_dim, generator=generator)
            if not (kept is not None and step.further and kept.follow()):
                kept = StepAttention(step.layout.grown(step.further), pool, backend, KINDS)
            anew = StepAttention(make_step(rows).layout, pool, backend, KINDS)
            readers = [row.tenant for row in rows for _ in row.tokens]
            assert kept.kv_bytes_read(readers) == anew.kv_bytes_read(readers)
            for number in range(len(KINDS)):
                got, wanted = (each.attend(number, query, *new, 0.25) for each in (kept, anew))
                assert torch.equal(got, wanted)


def test_most_steps_of_a_decode_keep_their_layout() -> None:
    segment = Segment((Run(0, 40), Run(100, 40)), 0)
    other = Segment((Run(200, 64),), 0, encoded=64)
    view = (Piece(other, 0, 64, 7),)
    maker = StepMaker()
    further = [maker.make([Row(0, (at,), at, segment, view, samples=True)]).further for at in range(80)]
    assert further == [*range(40), *range(40)], "one layout for each run of slots"


def test_a_window_that_begins_to_hide_while_a_decode_goes_on_is_noticed() -> None:
    if isinstance(available_kernels(), str):
        pytest.skip("there are no kernels")
    geometry = KVGeometry(len(KINDS), HEADS.kv_heads, HEADS.head_dim, torch.float32)
    pool = KVPool(geometry, 40 * geometry.bytes_per_token, CPU, 40)
    maker, backend = StepMaker(), NativeBackend(torch.float32, HEADS)
    segment, kept, generator = Segment((Run(0, 40),), 0), None, torch.Generator().manual_seed(1)
    for at in range(20):
        step = maker.make([Row(0, (at,), at, segment, (), samples=True)])
        query = torch.randn(1, HEADS.heads, HEADS.head_dim, generator=generator)
        new = torch.randn(2, HEADS.kv_heads, 1, HEADS.head_dim, generator=generator)
        if not (kept is not None and step.further and kept.follow()):
            kept = StepAttention(step.layout.grown(step.further), pool, backend, KINDS)
        anew = StepAttention(step.layout.grown(step.further), pool, FoldedBackend(torch.float32, CPU), KINDS)
        for number in range(len(KINDS)):
            got, wanted = (each.attend(number, query, *new, 0.25) for each in (kept, anew))
            assert (got - wanted).abs().max() <= 1e-5, f"token {at}, {KINDS[number].window}"
