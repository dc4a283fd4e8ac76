"""What the native kernel makes of numbers that are hardly any, and of long sums."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.company import HEADS, in_all_companies
from torch import Tensor

from choreo_agents.attention.backends import native as plan
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.native.library import available_kernels
from choreo_agents.native.structs import ATTEND, FP32, MERGE, WRITE, LayerStruct
from choreo_agents.testing.conformance import LayoutCase, drawn, prefill, rows

pytestmark = pytest.mark.skipif(
    isinstance(available_kernels(), str), reason=f"there are no kernels: {available_kernels()}"
)


def attended(layout: Layout, given: tuple[Tensor, Tensor, Tensor], kind: AttentionKind, scale: float = 0.25) -> Tensor:
    query, keys, _ = given
    shape = HeadShape(query.shape[1], keys.shape[0], query.shape[2])
    return NativeBackend(query.dtype, shape).prepare(layout, kind).attend(*given, scale)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, -1])
def test_no_number_stays_no_number(bits: int) -> None:
    layout = rows([70], [5])
    query, keys, values = drawn(LayoutCase(layout), torch.float32)
    keys[0, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    out = attended(layout, (query, keys, values), AttentionKind())
    assert out[:, :2].isnan().all() and out[:, 2:].isfinite().all(), "of the heads that read it, and of no others"


def test_a_run_of_which_every_score_is_minus_infinity_counts_for_nothing() -> None:
    layout = Layout((0,), (0,), (Read(0, 70, 0, (QuerySpan(0, 1, 0),)), Read(70, 3, 0, (QuerySpan(0, 1, 0),))))
    query, keys, values = drawn(LayoutCase(layout), torch.float32)
    query[:], keys[:, :70] = 1e20, -1e20
    keys[:, 70:] = 0.0
    out = attended(layout, (query, keys, values), AttentionKind())
    wanted = values[:, 70:].mean(dim=1).repeat_interleave(2, dim=0)
    assert (out[0] - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e3, 1e6])
def test_a_cap_of_any_size_costs_no_digits(softcap: float) -> None:
    layout = prefill(9, (200, 0, 0))
    given = drawn(LayoutCase(layout), torch.float32)
    kind = AttentionKind(softcap=softcap)
    wanted = ReferenceBackend().prepare(layout, kind).attend(*given, 0.25)
    assert (attended(layout, given, kind) - wanted).abs().max() <= 2e-6


@pytest.mark.parametrize("readers", [1, 60])
def test_long_runs_are_summed_without_loss(readers: int) -> None:
    layout = rows([1 << 16], [1] * readers)
    query, keys, values = drawn(LayoutCase(layout), torch.float32)
    keys[:], values[:] = 0.0, 0.1
    out = attended(layout, (query, keys, values), AttentionKind())
    # A chunk is a chain of additions, and so is the merge of all chunks: each is rounded by half a unit at most.
    assert (out / 0.1 - 1.0).abs().max() <= (plan.CHUNK + (1 << 16) / plan.CHUNK) * 2.0**-24


def test_what_a_row_finds_does_not_depend_on_how_many_read_the_same() -> None:
    many = rows([3000], [7] * 70)
    query, keys, values = drawn(LayoutCase(many), torch.float32)
    whole = attended(many, (query, keys, values), AttentionKind())
    for row in (0, 33, 69):
        reads = tuple(
            Read(read.start, read.length, read.position, (QuerySpan(0, 1, 0),))
            for read in many.reads
            if any(span.first == row for span in read.spans)
        )
        alone = Layout((many.positions[row],), (0,), reads)
        assert torch.equal(attended(alone, (query[row : row + 1], keys, values), AttentionKind())[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_up_in_the_order_of_the_rows_own_view(dtype: torch.dtype) -> None:
    """Whoever else reads them, in whatever order, and wherever they lie."""
    (_, first), *others = in_all_companies(NativeBackend(dtype, HEADS), dtype)
    assert len(others) == 17
    for where, out in others:
        assert torch.equal(out, first), where


def test_queries_and_new_keys_may_be_wider_than_the_pool() -> None:
    """As the lean pass has them: fp32 over bfloat16s, which rounds what it writes as torch does."""
    layout = prefill(9, (200, 0, 0))
    query, keys, values = drawn(LayoutCase(layout), torch.float32)
    short = keys.bfloat16(), values.bfloat16()
    wanted = ReferenceBackend().prepare(layout, AttentionKind()).attend(query, *(x.float() for x in short), 0.25)
    backend = NativeBackend(torch.bfloat16, HeadShape(4, 2, 16))
    pool = short[0].clone(), short[1].clone()
    slots = torch.tensor(layout.write_slots)
    for part in pool:
        part[:, slots] = 0
    new = [part[:, slots].contiguous() for part in (keys, values)]
    out = torch.empty_like(query)
    layer = LayerStruct(dtype=FP32, scale=0.25, query=query.data_ptr(), out=out.data_ptr(), slots=slots.data_ptr())
    layer.keys, layer.values = (part.data_ptr() for part in pool)
    layer.query_token, layer.query_head, _ = query.stride()
    layer.pool_head, layer.pool_slot, _ = pool[0].stride()
    layer.new_keys, layer.new_values = (part.data_ptr() for part in new)
    layer.new_key_head, layer.new_key_token, _ = new[0].stride()
    layer.new_value_head, layer.new_value_token, _ = new[1].stride()
    prepared = backend.prepare(layout, AttentionKind())
    plan_of = prepared.plan(HeadShape(4, 2, 16))
    backend.kernel.attend(plan_of.address, ctypes.addressof(layer), WRITE | ATTEND | MERGE)
    assert torch.equal(pool[0], short[0]) and torch.equal(pool[1], short[1])
    assert (out - wanted).abs().max() <= 1e-5


def test_layers_may_have_different_numbers_of_query_heads() -> None:
    layout = prefill(9, (200, 0, 0))
    query, keys, values = drawn(LayoutCase(layout), torch.float32)
    shape = HeadShape(query.shape[1], keys.shape[0], query.shape[2])
    prepared = NativeBackend(torch.float32, shape).prepare(layout, AttentionKind())
    for heads in (query, query.repeat_interleave(4, dim=1)):
        wanted = ReferenceBackend().prepare(layout, AttentionKind()).attend(heads, keys, values, 0.25)
        assert (prepared.attend(heads, keys, values, 0.25) - wanted).abs().max() <= 2e-6
