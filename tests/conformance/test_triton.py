"""The Triton backend, interpreted on a CPU: all that is asked of any backend, and what it promises beyond."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.company import in_all_companies
from support.interpreted import products_by_rows
from torch import Tensor

from choreo_agents.attention.backends import AttentionBackend, make_backend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import HeadShape
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.step import StepAttention
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.testing.conformance import (
    CASES,
    KINDS,
    TELLING,
    TOLERANCE,
    BackendConformance,
    LayoutCase,
    drawn,
    kind_of,
    mixed,
    prefill,
)

pytest.importorskip("triton", reason="the extra `kernels` is not installed: make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make test-triton sets it", allow_module_level=True)

from choreo_agents.attention.backends.triton import launch
from choreo_agents.attention.backends.triton.backend import TritonBackend
from choreo_agents.attention.backends.triton.tiles import FEW_QUERIES, FEW_SLOTS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    products_by_rows(monkeypatch)


class TestTriton(BackendConformance):
    dtypes = tuple(TOLERANCE)

    def backend(self, dtype: torch.dtype) -> AttentionBackend:
        return make_backend("triton", dtype, CPU)


def test_no_case_is_left_out(request: pytest.FixtureRequest) -> None:
    collected = [item for item in request.session.items if getattr(item, "cls", None) is TestTriton]
    if request.config.option.keyword or any("::" in given for given in request.config.args):
        pytest.skip("only some were asked for")
    dtypes = len(TOLERANCE)
    assert len(collected) == len(CASES) * dtypes + len(TELLING) * len(KINDS) * 2 + 3 * dtypes + 2
    assert not [item for item in collected if [*item.iter_markers("skip"), *item.iter_markers("skipif")]]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [(14, 2, 20), (71, 1, 16), (3, 3, 24), (10, 2, 80)], ids=str)
def test_heads_of_any_shape(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Groups that fill no tile evenly, or more than one, and dimensions that are no power of two."""
    case = LayoutCase(mixed(), *heads)
    suite = TestTriton()
    suite.require_conforming(case, kind_of(heads[2]), dtype)


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_what_turns_may_begin_behind_the_first_dimension(pairing: Any) -> None:
    whole = kind_of(24, pairing, share=0.5)
    assert whole.rotation is not None
    kind = replace(whole, rotation=replace(whole.rotation, first=8))
    TestTriton().require_conforming(LayoutCase(mixed(), head_dim=24), kind, torch.float32, sinks=True)


def test_a_window_that_cuts_a_prefill_and_decodes_of_one_run() -> None:
    """Rows with many queries and with few read one run, each up to where its window begins."""
    count = FEW_QUERIES + 9
    parent = Read(0, 150, 0, (QuerySpan(0, count, 0), QuerySpan(count, 1, 0), QuerySpan(count + 1, 1, -7)))
    own = (
        Read(150, count, 150, (QuerySpan(0, count, 0),), causal=True),
        Read(200, 3, 150, (QuerySpan(count, 1, 0),)),
        Read(210, 1, 143, (QuerySpan(count + 1, 1, 0),)),
    )
    layout = Layout((*range(150, 150 + count), 152, 143), tuple(range(count + 2)), (parent, *own))
    for window in (1, 20, 70, 140):
        TestTriton().require_conforming(LayoutCase(layout), kind_of(16, window=window), torch.float32)


# --- launches and copies ---


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are started."""
    started: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(launch, name)

        def __getitem__(self, grid: Any) -> Any:
            started.append(self.name)
            return self.kernel[grid]

    for name in ("store_kernel", "attend_kernel", "merge_kernel"):
        monkeypatch.setattr(launch, name, Counted(name))
    return started


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each buffer that is sent to the device."""
    sent: list[int] = []
    send = SentTables.send

    def counted(self: SentTables) -> None:
        if self.host:
            sent.append(sum(array.nbytes for array in self.host.values()))
        send(self)

    monkeypatch.setattr(SentTables, "send", counted)
    return sent


def pool_of(layers: int, slots: int, heads: HeadShape) -> KVPool:
    geometry = KVGeometry(layers, heads.kv_heads, heads.head_dim, torch.float32)
    pool = KVPool(geometry, slots * geometry.bytes_per_token, CPU)
    generator = torch.Generator().manual_seed(0)
    for layer in (*pool.keys, *pool.values):
        layer.copy_(torch.randn(layer.shape, generator=generator))
    return pool


KINDS_OF_A_STEP = (kind_of(16), kind_of(16, window=4000), kind_of(16, softcap=5.0))
HEADS = HeadShape(4, 2, 16)


def test_a_layer_takes_at_most_four_launches_and_a_step_one_copy(launches: list[str], buffers: list[int]) -> None:
    """Of three kinds of layers, over a prefill and decodes of many messages, with keys that are written."""
    count = FEW_QUERIES + 4
    parents = [Read(16 * i, 16, 16 * i, (QuerySpan(0, count, i), QuerySpan(count, 1, 3 - i))) for i in range(12)]
    own = [
        Read(192, count, 300, (QuerySpan(0, count, 0),), causal=True),
        Read(352, 5, 600, (QuerySpan(count, 1, 0),)),
    ]
    layout = Layout((*range(300, 300 + count), 604), (*range(192, 192 + count), 356), (*parents, *own))
    query, new = torch.randn(count + 1, 4, 16), torch.randn(2, 2, count + 1, 16)
    pool = pool_of(3, 368, HEADS)
    step = StepAttention(layout, pool, TritonBackend(torch.float32, CPU), KINDS_OF_A_STEP)
    for layer, kind in enumerate(KINDS_OF_A_STEP):
        launches.clear()
        got = step.attend(layer, query, *new, 0.25)
        assert sorted(launches) == ["attend_kernel", "attend_kernel", "merge_kernel", "store_kernel"]
        slots = torch.tensor(layout.write_slots)
        assert pool.keys[layer][:, slots].equal(new[0]) and pool.values[layer][:, slots].equal(new[1])
        keys, values = pool.keys[layer], pool.values[layer]
        wanted = ReferenceBackend().prepare(layout, kind).attend(query, keys, values, 0.25)
        assert (got - wanted).abs().max() <= 1e-5
    assert len(buffers) == 1, "one buffer for all kinds of layers"


def decode(at: int, further: int = 0) -> Layout:
    """Two rows that decode over a run of both and one of the second's, so many tokens into their own."""
    reads = (
        Read(0, 40, 0, (QuerySpan(0, 1, 30), QuerySpan(1, 1, 0))),
        Read(40, 9, 40, (QuerySpan(1, 1, 2),)),
        Read(64, at, 70, (QuerySpan(0, 1, 0),)),
        Read(64 + 2 * FEW_SLOTS, at, 51, (QuerySpan(1, 1, 0),)),
    )
    layout = Layout((69 + at, 50 + at), (63 + at, 63 + 2 * FEW_SLOTS + at), reads, (2, 3))
    return layout.grown(further)


@pytest.mark.parametrize("heads", [(4, 2, 16), (80, 1, 16)], ids=["usual", "a pair in several tiles"])
def test_a_step_that_follows_is_the_step_that_is_prepared_anew(heads: Any, buffers: list[int]) -> None:
    """Bit by bit, with one copy a step, until a run fills its chunk."""
    shape = HeadShape(*heads)
    pool, backend = pool_of(2, 80 + 4 * FEW_SLOTS, shape), TritonBackend(torch.float32, CPU)
    kinds = KINDS_OF_A_STEP[:2]
    begun = decode(FEW_SLOTS - 2)
    kept = StepAttention(begun, pool, backend, kinds)
    for further in range(4):
        query, new = torch.randn(2, shape.heads, 16), torch.randn(2, shape.kv_heads, 2, 16)
        if further:
            before = len(buffers)
            if kept.follow():
                assert further < 3 and len(buffers) == before + 1
            else:
                assert further == 3, "the runs fit their chunks"
                kept = StepAttention(begun.grown(further), pool, backend, kinds)
        anew = StepAttention(begun.grown(further), pool, backend, kinds)
        assert kept.kv_bytes_read(["", ""]) == anew.kv_bytes_read(["", ""])
        for layer in range(2):
            got, wanted = (each.attend(layer, query, *new, 0.25) for each in (kept, anew))
            assert got.equal(wanted)


def test_a_window_that_begins_to_hide_is_prepared_anew() -> None:
    pool, backend = pool_of(1, 720, HEADS), TritonBackend(torch.float32, CPU)
    query, new = torch.randn(2, 4, 16), torch.randn(2, 2, 2, 16)
    for window, goes_on in ((62, [False] * 3), (93, [True, True, False])):  # no row is more than 90 behind a slot
        kept = StepAttention(decode(21), pool, backend, (kind_of(16, window=window),))
        kept.attend(0, query, *new, 0.25)
        assert [kept.follow() for _ in range(3)] == goes_on


# --- company ---


@pytest.mark.parametrize("window", [None, 33])
def test_a_row_is_given_the_same_bits_in_any_company(window: int | None) -> None:
    """Alone, after others, among them in another order, and beside a prefill that reads the same run."""
    kind = kind_of(16, window=window)
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 2, 1200, 16, generator=generator)
    query = torch.randn(1, 4, 16, generator=generator)
    positions, reads = 640, [(0, 600, 0, 11), (700, 20, 0, 611), (900, 10, 631, 0)]

    def step(others: int, prefilled: int, *, turned: bool) -> Tensor:
        mine = others + prefilled
        made: list[Read] = []
        for start, length, position, shift in reads:
            spans = [QuerySpan(row, 1, 3 * row) for row in range(others) if start == 0]
            if prefilled and start == 0:
                spans.append(QuerySpan(others, prefilled, 5))
            spans.append(QuerySpan(mine, 1, shift))
            made.append(Read(start, length, position, tuple(spans)))
        own = [Read(1000 + 2 * row, 1, 2000, (QuerySpan(row, 1, 0),)) for row in range(others)]
        if prefilled:
            own.append(Read(1100, prefilled, 640, (QuerySpan(others, prefilled, 0),), causal=True))
        made = [*own, *reversed(made)] if turned else [*made, *own]
        at = (*[2000] * others, *range(640, 640 + prefilled), positions)
        strangers = torch.randn(mine, 4, 16, generator=generator)
        layout = Layout(at, tuple(range(mine + 1)), tuple(made))
        prepared = TritonBackend(torch.float32, CPU).prepare(layout, kind)
        return prepared.attend(torch.cat((strangers, query)), keys, values, 0.25)[-1]

    alone = step(0, 0, turned=False)
    for others, prefilled, turned in ((1, 0, False), (9, 0, True), (40, 0, False), (3, FEW_QUERIES + 5, True)):
        assert step(others, prefilled, turned=turned).equal(alone), (others, prefilled, turned)


def test_a_row_whose_window_begins_later_than_its_companys_is_given_the_same_bits() -> None:
    """Blocks lie as the chunk does, not as what a tile's rows see of it."""
    kind = kind_of(16, window=150)
    keys, values = torch.randn(2, 2, 250, 16, generator=torch.Generator().manual_seed(5))
    query = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(6))
    backend = TritonBackend(torch.float32, CPU)
    alone = Layout((210,), (240,), (Read(0, 200, 0, (QuerySpan(0, 1, 0),)), Read(240, 1, 210, (QuerySpan(0, 1, 0),))))
    wanted = backend.prepare(alone, kind).attend(query[1:], keys, values, 0.25)[0]
    for further in (7, 40, 50):
        reads = (
            Read(0, 200, 0, (QuerySpan(0, 1, 0), QuerySpan(1, 1, 0))),
            Read(241, 1, 210 - further, (QuerySpan(0, 1, 0),)),
            Read(240, 1, 210, (QuerySpan(1, 1, 0),)),
        )
        both = Layout((210 - further, 210), (241, 240), reads)
        assert backend.prepare(both, kind).attend(query, keys, values, 0.25)[1].equal(wanted)


def test_a_prefill_is_given_the_same_bits_in_any_company() -> None:
    kind, count = kind_of(16), FEW_QUERIES + 13
    alone = prefill(count, (50, 0, 0), (30, 9, 50))
    query, keys, values = drawn(LayoutCase(alone), torch.float32)
    wanted = TritonBackend(torch.float32, CPU).prepare(alone, kind).attend(query, keys, values, 0.25)
    spans = [tuple(replace(span, first=span.first + 2) for span in read.spans) for read in alone.reads]
    reads = [replace(read, spans=each) for read, each in zip(alone.reads, spans, strict=True)]
    reads[0] = replace(reads[0], spans=(QuerySpan(0, 2, 4), *reads[0].spans))
    layout = Layout((7, 8, *alone.positions), tuple(range(count + 2)), tuple(reads))
    strangers = torch.cat((torch.randn(2, 4, 16), query))
    got = TritonBackend(torch.float32, CPU).prepare(layout, kind).attend(strangers, keys, values, 0.25)
    assert got[2:].equal(wanted)


# --- refusals ---


def test_what_it_cannot_serve_is_refused_with_the_reason() -> None:
    for dtype, heads, complaint in (
        (torch.float64, HEADS, "float32, bfloat16 and float16, not torch.float64"),
        (torch.float32, HeadShape(2, 2, 512), "dimensions up to 256, not 512"),
    ):
        assert complaint in str(TritonBackend.tried(dtype, CPU, heads))


def test_parts_are_added_up_in_the_order_of_the_rows_own_view() -> None:
    """Whoever else reads them, in whatever order, and wherever they lie."""
    (_, first), *others = in_all_companies(TritonBackend(torch.float32, CPU), torch.float32)
    for where, out in others:
        assert torch.equal(out, first), where
