"""Backends for CPUs against the readable reference on random layouts, and the parts they are made of."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from choreo_agents.attention.backends import AttentionBackend, partial
from choreo_agents.attention.backends import native as plan
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.backends.partial import LogSumExpMerge, attend_padded, attend_run, matmul_attention
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.triton import plan as gpu_plan
from choreo_agents.attention.backends.triton.tiles import Tile
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Layout, QuerySpan, Read, windowed
from choreo_agents.attention.rope import PureRotation
from choreo_agents.native.library import available_kernels as kernels_found

DIM, KV_HEADS = 16, 2
ROTATION = PureRotation(1.0 / 10_000 ** (torch.arange(0, DIM, 2) / DIM))
INTERLEAVED = PureRotation(ROTATION.inverse_frequencies, "neighbours")
PARTIAL = PureRotation(ROTATION.inverse_frequencies[:3], first=4)
KIND = AttentionKind(ROTATION)
needs_kernels = pytest.mark.skipif(isinstance(kernels_found(), str), reason=f"no kernels: {kernels_found()}")
CPU = torch.device("cpu")
seeds = st.integers(0, 2**32)
groups = st.sampled_from([1, 2, 4])
shifts = st.one_of(st.just(0), st.integers(-300, 300))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the slots that it reads: rows of tokens, each with its own run and any of the shared ones."""
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 6), st.just(40)), min_size=1, max_size=5))
    starts = [draw(st.integers(0, 400)) for _ in counts]
    reads: list[Read] = []
    slots = 0
    for length in draw(st.lists(st.sampled_from([1, 2, 7, 100, 128, 129, 200]), max_size=5)):
        spans = [QuerySpan(sum(counts[:i]), counts[i], draw(shifts)) for i in readers(draw, len(counts))]
        if spans:
            reads.append(Read(slots, length, draw(st.integers(0, 400)), tuple(spans)))
        slots += length
    first = 0
    for count, start in zip(counts, starts, strict=True):
        causal = count > 1 or draw(st.booleans())
        length = count if causal else draw(st.sampled_from([1, 3, 90, 150]))
        reads.append(Read(slots, length, start + count - length, (QuerySpan(first, count, 0),), causal))
        slots += length
        first += count
    reads = draw(st.permutations(reads))
    positions = [start + i for count, start in zip(counts, starts, strict=True) for i in range(count)]
    return Layout(tuple(positions), tuple(range(first)), tuple(reads)), slots


def readers(draw: st.DrawFn, rows: int) -> list[int]:
    return sorted(draw(st.lists(st.integers(0, rows - 1), max_size=rows + 1)))


@st.composite
def kinds(draw: st.DrawFn) -> AttentionKind:
    """Any combination of what layers differ in."""
    rotation = draw(st.sampled_from([None, ROTATION, INTERLEAVED, PARTIAL]))
    window = draw(st.one_of(st.none(), st.integers(1, 12), st.integers(13, 500)))
    return AttentionKind(rotation, window, draw(st.sampled_from([None, 0.5, 30.0])))


def attended(
    layout: Layout,
    slots: int,
    group: int,
    seed: int,
    dtype: torch.dtype,
    kind: AttentionKind = KIND,
    made: Callable[[torch.dtype, int], AttentionBackend] = lambda dtype, group: FoldedBackend(dtype, CPU),
) -> Tensor:
    """What a backend, the folded one by default, makes of random numbers."""
    query = normal(seed, len(layout.positions), KV_HEADS * group, DIM, dtype=dtype)
    keys, values = normal(seed + 1, 2, KV_HEADS, slots, DIM, dtype=dtype)
    sinks = normal(seed + 2, KV_HEADS * group, dtype=dtype) if seed % 2 else None
    got = made(dtype, group).prepare(layout, kind).attend(query, keys, values, DIM**-0.5, sinks)
    assert got.shape == query.shape and got.dtype == dtype
    return got


def both(*case: Any) -> tuple[Tensor, Tensor]:
    """What a backend and the reference make of the same random numbers."""
    return attended(*case), attended(*case[:5], *(case[5:6] or (KIND,)), lambda *_: ReferenceBackend())


@given(layouts(), groups, seeds, kinds())
def test_folded_attention_is_exact(layout: tuple[Layout, int], group: int, seed: int, kind: AttentionKind) -> None:
    got, wanted = both(*layout, group, seed, torch.float32, kind)
    assert (got - wanted).abs().max() <= 1e-5


@given(layouts(), groups, seeds, kinds())
def test_folded_attention_in_bf16_loses_no_more_than_bf16_does(layout, group: int, seed: int, kind) -> None:
    got, wanted = both(*layout, group, seed, torch.bfloat16, kind)
    assert (got.float() - wanted.float()).abs().max() <= 0.06


@given(layouts(), groups, seeds, kinds())
def test_folded_attention_is_exact_on_devices_without_the_cpu_kernel(layout, group: int, seed: int, kind) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial, "_flash_for_cpu", None)
        got, wanted = both(*layout, group, seed, torch.float32, kind)
    assert (got - wanted).abs().max() <= 1e-5


def native(dtype: torch.dtype, group: int) -> AttentionBackend:
    return NativeBackend(dtype, HeadShape(KV_HEADS * group, KV_HEADS, DIM))


@needs_kernels
@given(layouts(), groups, seeds, kinds())
def test_native_attention_is_exact(layout: tuple[Layout, int], group: int, seed: int, kind: AttentionKind) -> None:
    got, wanted = both(*layout, group, seed, torch.float32, kind, native)
    assert (got - wanted).abs().max() <= 1e-5


@needs_kernels
@given(layouts(), groups, seeds, kinds())
def test_native_attention_in_bf16_rounds_its_queries_and_what_it_returns_alone(layout, group: int, seed, kind) -> None:
    """Sums are in fp32: what is left is half a unit in the last of eight bits, of numbers below eight."""
    got, wanted = both(*layout, group, seed, torch.bfloat16, kind, native)
    assert ((got.float() - wanted.float()).abs() <= 2.0**-8 * wanted.float().abs() + 1e-2).all()


@pytest.mark.slow
@needs_kernels
@given(layouts(), groups, seeds, kinds())
def test_threads_change_no_bit_of_native_attention(layout, group: int, seed: int, kind: AttentionKind) -> None:
    before = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "FEWEST_SHARED", 0)
            found = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(attended(*layout, group, seed, torch.float32, kind, native))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@given(layouts(), st.integers(1, 300))
def test_a_window_leaves_every_token_exactly_the_slots_within_it(layout: tuple[Layout, int], window: int) -> None:
    """Each once, and no read hides all of its slots from one of its tokens, which would corrupt a merge."""
    plan, _ = layout
    wanted = Counter((t, s, d) for t, s, d, distance in seen(plan) if distance < window)
    cut = windowed(plan, window)
    left = [(t, s, d) for t, s, d, distance in seen(cut) if distance < window]
    assert Counter(left) == wanted
    for read in cut.reads:
        for span in read.spans:
            alone = Layout(plan.positions, plan.write_slots, (replace(read, spans=(span,)),))
            visible = [(t, distance < window) for t, _, _, distance in seen(alone)]
            assert {t for t, sees in visible if sees} == set(range(span.first, span.first + span.count))
            assert read.window is not None or all(sees for _, sees in visible)


def seen(layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """Each token, slot and shift that a layout without windows lets meet, and how far apart they stand."""
    for read in layout.reads:
        for span in read.spans:
            for i in range(span.count):
                for at in range(i + 1 if read.causal else read.length):
                    distance = layout.positions[span.first + i] - (read.position + at + span.shift)
                    yield span.first + i, read.start + at, span.shift, distance


def test_readers_whose_windows_begin_apart_still_share_what_all_of_them_see() -> None:
    spans = tuple(QuerySpan(i, 1, 0) for i in range(4))
    cut = windowed(Layout((100, 101, 102, 103), (0, 1, 2, 3), (Read(0, 100, 0, spans),)), 50)
    assert sorted((read.start, read.length, read.queries) for read in cut.reads) == [
        (51, 1, 1),
        (52, 1, 2),
        (53, 1, 3),
        (54, 46, 4),
    ]


@given(layouts(), groups, seeds, st.integers(-200, 200))
def test_moving_a_whole_view_changes_nothing(layout, group: int, seed: int, by: int) -> None:
    """Queries and shifts moved alike: only position differences matter."""
    plan, slots = layout
    query = normal(seed, len(plan.positions), KV_HEADS * group, DIM)
    keys, values = normal(seed + 1, 2, KV_HEADS, slots, DIM)
    still, moved = (
        Layout(plan.positions, plan.write_slots, tuple(seen_from(read, by) for read in plan.reads)) for by in (0, by)
    )
    cos, sin = ROTATION.cos_sin(torch.full((len(query),), by))
    backend = FoldedBackend(torch.float32, CPU)
    one = backend.prepare(still, KIND).attend(query, keys, values, DIM**-0.5)
    two = backend.prepare(moved, KIND).attend(ROTATION.apply(query, cos, sin), keys, values, DIM**-0.5)
    assert (one - two).abs().max() <= 2e-5


def seen_from(read: Read, by: int) -> Read:
    """The read `by` positions further away; a causal one, which nothing can shift, in full."""
    spans = tuple(QuerySpan(s.first, s.count, s.shift + by) for s in read.spans)
    return Read(read.start, read.length, read.position, spans)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    seeds,
    st.sampled_from([0.2, 1.0, 40.0]),
    st.sampled_from(["even", "padded", "scattered"]),
)
def test_merging_parts_is_the_softmax_over_their_union(lengths, count: int, seed: int, scale: float, how: str) -> None:
    """Large scales put the parts' log-sum-exps far apart."""
    query, keys, values = normal(seed, 3, count, DIM), *normal(seed + 1, 2, 3, sum(lengths), DIM)
    parts = [
        attend_run(query, key, value, scale, causal=False)
        for key, value in zip(keys.split(lengths, 1), values.split(lengths, 1), strict=True)
    ]
    outs = torch.cat([out.transpose(0, 1) for out, _ in parts])
    lses = torch.cat([lse.transpose(0, 1) for _, lse in parts])
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.arange(count).repeat(len(lengths))
    order = torch.randperm(len(outs), generator=generator)
    if how != "even":
        # Each token keeps its first part, and of the others as chance has it.
        seen = (torch.rand(len(outs), generator=generator) < 0.5) | (torch.arange(len(outs)) < count)
        order = order[seen[order]]
    merging = LogSumExpMerge(tokens[order], count)
    if how == "scattered":
        merging._parts = None
    got, lse = merging.join(outs[order], lses[order], with_lse=True)
    slots = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    hidden = torch.ones(count, len(lengths), dtype=torch.bool)
    hidden[tokens[order], order // count] = False
    scores = (query.double() @ keys.double().transpose(1, 2)) * scale
    scores = scores.masked_fill(hidden[:, slots], float("-inf"))
    assert lse is not None and (lse - scores.logsumexp(-1).transpose(0, 1)).abs().max() <= 1e-4
    wanted = scores.softmax(-1) @ values.double()
    assert (got - wanted.transpose(0, 1)).abs().max() <= 1e-4
    assert merging.join(outs[order], lses[order], with_lse=False)[0].equal(got)


def test_few_tokens_with_most_of_the_parts_are_not_padded_for() -> None:
    assert LogSumExpMerge(torch.tensor([0] * 40 + list(range(1, 30))), 30)._parts is None
    assert LogSumExpMerge(torch.tensor([0, 1, 2, 0]), 3)._parts is not None


@given(groups, st.integers(1, 40), st.integers(1, 200), st.booleans(), seeds, st.booleans())
@example(group=2, queries=1, slots=1, causal=True, seed=0, wide=False)
def test_the_kernel_and_plain_matrix_products_agree(group, queries, slots, causal, seed, wide) -> None:
    dtype, tolerance = (torch.float32, 1e-5) if wide else (torch.bfloat16, 0.06)
    slots = queries if causal else slots
    query = normal(seed, KV_HEADS * group, queries, DIM, dtype=dtype)
    keys, values = normal(seed + 1, 2, KV_HEADS, slots, DIM, dtype=dtype)
    out, lse = attend_run(query, keys, values, 0.25, causal=causal)
    plain_out, plain_lse = matmul_attention(query, keys, values, 0.25, causal=causal)
    assert out.shape == plain_out.shape and out.dtype == plain_out.dtype == dtype
    assert lse.shape == plain_lse.shape and lse.dtype == plain_lse.dtype == torch.float32
    assert (out.float() - plain_out.float()).abs().max() <= tolerance
    assert (lse - plain_lse).abs().max() <= tolerance


@given(groups, st.integers(1, 12), st.booleans(), seeds)
def test_plain_matrix_products_are_softmax_attention(group: int, queries: int, causal: bool, seed: int) -> None:
    slots = queries if causal else 9
    query, (keys, values) = normal(seed, KV_HEADS * group, queries, DIM), normal(seed + 1, 2, KV_HEADS, slots, DIM)
    out, lse = matmul_attention(query, keys, values, 0.25, causal=causal)
    for head in range(KV_HEADS * group):
        for i in range(queries):
            end = i + 1 if causal else slots
            scores = keys[head // group, :end].double() @ query[head, i].double() * 0.25
            wanted = scores.softmax(-1) @ values[head // group, :end].double()
            assert (out[head, i] - wanted).abs().max() <= 1e-5 and abs(lse[head, i] - scores.logsumexp(-1)) <= 1e-5


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 6), seeds, st.booleans(), st.booleans())
def test_padded_runs_agree_with_each_run_alone(lengths, queries: int, seed: int, wide: bool, kernel: bool) -> None:
    """What stands in the padding does not matter, as long as it is finite."""
    dtype, tolerance = (torch.float32, 1e-5) if wide else (torch.bfloat16, 0.06)
    longest = max(lengths)
    query = normal(seed, len(lengths), KV_HEADS, queries, DIM, dtype=dtype)
    keys, values = normal(seed + 1, 2, len(lengths), KV_HEADS, longest, DIM, dtype=dtype)
    padded = torch.arange(longest)[None, :] >= torch.tensor(lengths)[:, None]
    keys[padded[:, None].expand(-1, KV_HEADS, -1)] = 50.0
    values[padded[:, None].expand(-1, KV_HEADS, -1)] = 1e4
    hidden = torch.zeros(padded.shape, dtype=dtype).masked_fill(padded, float("-inf"))[:, None, None, :]
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(partial, "_flash_for_cpu", None)
        out, lse = attend_padded(query, keys, values, hidden, 0.25)
    assert out.dtype == dtype and lse.dtype == torch.float32
    for run, length in enumerate(lengths):
        alone = matmul_attention(query[run], keys[run, :, :length], values[run, :, :length], 0.25, causal=False)
        assert (out[run].float() - alone[0].float()).abs().max() <= tolerance
        assert (lse[run] - alone[1]).abs().max() <= tolerance


@pytest.mark.parametrize("rotation", [ROTATION, INTERLEAVED, PARTIAL], ids=["whole", "interleaved", "partial"])
@given(one=shifts, two=shifts, seed=seeds)
def test_rotations_compose_and_undo_each_other(rotation: PureRotation, one: int, two: int, seed: int) -> None:
    vectors = normal(seed, 1, 3, DIM)

    def moved(start: Tensor, by: int) -> Tensor:
        return rotation.apply(start, *rotation.cos_sin(torch.tensor([by])))

    assert (moved(moved(vectors, one), two) - moved(vectors, one + two)).abs().max() <= 1e-5
    assert (moved(moved(vectors, one), -one) - vectors).abs().max() <= 1e-5
    key = normal(seed + 1, 1, 3, DIM)
    turned_query, turned_key = (moved(vectors, -one) * key).sum(-1), (vectors * moved(key, one)).sum(-1)
    assert (turned_query - turned_key).abs().max() <= 1e-4, "rotating the query back is not moving the key on"


@given(layouts(), groups, kinds(), st.sampled_from([8, 32, 128]), st.sampled_from([4, 16]))
def test_chunks_that_all_see_whole_are_planned_together_as_they_are_one_by_one(
    layout, group, kind, chunk, rows
) -> None:
    sizes = Tile(chunk, rows, 16, 4, 3), Tile(2 * chunk, rows, 16, 4, 3)
    together = gpu_plan.KindPlan(layout[0], kind, group, sizes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_plan, "_seen_whole", lambda *_: range(0))
        alone = gpu_plan.KindPlan(layout[0], kind, group, sizes)
    assert together.sizes == alone.sizes and together.steps_left == alone.steps_left
    for name, array in alone.arrays.items():
        assert together.arrays[name].tolist() == array.tolist(), name
