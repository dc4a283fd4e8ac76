"""The same cases on every attention backend that this machine has, against the readable reference.

A case is a layout over a pool of random keys and values. Tolerances: 1e-5 in fp32, 0.06 in bf16, on outputs that are
means of standard normal values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from choreo_agents.attention.backends import available_backends, make_backend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.rope import PureRotation

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06}


@dataclass(frozen=True)
class Case:
    layout: Layout
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16

    @property
    def slots(self) -> int:
        return max(read.start + read.length for read in self.layout.reads)


def rows(*lengths: list[int], shifts: Callable[[int], int] = lambda _: 0, own: int = 3) -> Layout:
    """A tree of segments, level by level, with as many decoding rows as leaves.

    Level [[7, 7], [9, 10, 11, 4]]: two roots of 7 tokens, under which four branches stand, two under each. Row i also
    reads `own` tokens of its own.
    """
    leaves = len(lengths[-1])
    reads: list[Read] = []
    slot = 0
    for level in lengths:
        share = leaves // len(level)
        for segment, length in enumerate(level):
            readers = range(segment * share, (segment + 1) * share)
            if length:
                spans = tuple(QuerySpan(row, 1, shifts(row)) for row in readers)
                reads.append(Read(slot, length, 0, spans))
            slot += length
    end = sum(max(level) for level in lengths) + 7
    for row in range(leaves):
        reads.append(Read(slot, own, end, (QuerySpan(row, 1, 0),)))
        slot += own
    return Layout((end + own - 1,) * leaves, tuple(range(leaves)), tuple(reads))


def prefill(count: int, *parents: tuple[int, int, int]) -> Layout:
    """One row of `count` new tokens over parents given as (length, where encoded, where shown)."""
    reads: list[Read] = []
    slot = 0
    for length, native, shown in parents:
        reads.append(Read(slot, length, native, (QuerySpan(0, count, shown - native),)))
        slot += length
    start = max((shown + length for length, _, shown in parents), default=0)
    own = Read(slot, count, start, (QuerySpan(0, count, 0),), causal=True)
    return Layout(tuple(range(start, start + count)), tuple(range(count)), (*reads, own))


def mixed() -> Layout:
    """A prefill chunk and decodes in one step, with views that overlap, are no tree, and show one message twice.

    segment a: read by the prefill at 0, by row 1 at 50 and, in the same step and by the same row, at 300;
    segment b: read by rows 1 and 2 at different places, before a for one and after it for the other.
    """
    a = Read(0, 40, 0, (QuerySpan(0, 5, 0), QuerySpan(5, 1, 50), QuerySpan(5, 1, 300), QuerySpan(6, 1, 130)))
    b = Read(40, 129, 40, (QuerySpan(5, 1, 60), QuerySpan(6, 1, -40)))
    own = (
        Read(169, 5, 40, (QuerySpan(0, 5, 0),), causal=True),
        Read(180, 1, 400, (QuerySpan(5, 1, 0),)),
        Read(190, 17, 200, (QuerySpan(6, 1, 0),)),
    )
    return Layout((40, 41, 42, 43, 44, 400, 216), tuple(range(7)), (a, b, *own))


CASES = {
    "no parents": Case(prefill(9)),
    "one token that sees itself": Case(prefill(1)),
    "one-token segments": Case(prefill(6, (1, 0, 3), (1, 7, 0), (1, 2, 9))),
    "many one-token segments": Case(rows(*[[1]] * 9, [1] * 3)),
    "a segment far away": Case(prefill(4, (33, 0, 100_000))),
    "a tree": Case(rows([7, 7], [9, 10, 11, 4])),
    "a ragged tree": Case(rows([7, 7], [9, 10, 11, 4], [129, 2, 1, 64, 65, 127, 3, 128])),
    "a tree with a missing branch": Case(rows([7, 7], [9, 0, 11, 4])),
    "a long trunk": Case(rows([16384], [1, 128, 256])),
    "a trunk shown at many places": Case(rows([700], [3] * 6, shifts=lambda row: 37 * row - 90)),
    "no tree": Case(mixed()),
    "one row": Case(rows([300], [40])),
    "many rows": Case(rows([513], [5] * 32)),
    "every head its own keys": Case(mixed(), heads=4, kv_heads=4),
    "one head of keys for all": Case(mixed(), heads=8, kv_heads=1),
    "wide heads": Case(mixed(), head_dim=128),
    "a chunk of prefill": Case(prefill(200, (600, 0, 0), (90, 10, 600))),
}

KINDS = {
    "plain": {},
    "without positions": {"rotation": None},
    "interleaved": {"pairing": "neighbours"},
    "partial": {"share": 0.5},
    "soft-capped": {"softcap": 20.0},
    "window of 1": {"window": 1},
    "window of 64": {"window": 64},
    "window of 4096": {"window": 4096},
}


def kind_of(head_dim: int, pairing: str = "halves", share: float = 1.0, **changes: object) -> AttentionKind:
    turned = int(head_dim * share)
    frequencies = 1.0 / 10_000 ** (torch.arange(0, turned, 2) / turned)
    settings = {"rotation": PureRotation(frequencies, pairing), "window": None, "softcap": None}
    return AttentionKind(**(settings | changes))


def drawn(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(case.layout.positions), case.heads, case.head_dim, generator=generator)
    keys, values = torch.randn(2, case.kv_heads, case.slots, case.head_dim, generator=generator)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def require_conform(backend: str, case: Case, kind: AttentionKind, dtype: torch.dtype, *, sinks: bool) -> None:
    device = available_backends()[backend]
    query, keys, values = drawn(case, dtype)
    sink = torch.linspace(-2, 2, case.heads).to(dtype) if sinks else None
    scale = case.head_dim**-0.5
    wanted = ReferenceBackend().prepare(case.layout, kind).attend(query, keys, values, scale, sink)
    prepared = make_backend(backend, dtype, device).prepare(case.layout, kind)
    moved = [tensor.to(device) for tensor in (query, keys, values)]
    got = prepared.attend(*moved, scale, None if sink is None else sink.to(device))
    assert got.shape == wanted.shape and got.dtype == dtype
    error = (got.cpu().float() - wanted.float()).abs().max().item()
    assert error <= TOLERANCE[dtype], f"{error} off"


every_backend = pytest.mark.parametrize("backend", sorted(available_backends()))


@every_backend
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_layout(backend: str, case: str, dtype: torch.dtype) -> None:
    require_conform(backend, CASES[case], kind_of(CASES[case].head_dim), dtype, sinks=False)


@every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["no tree", "a ragged tree", "a chunk of prefill", "one-token segments"])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_kind_of_layer(backend: str, case: str, kind: str, sinks: bool) -> None:
    made = kind_of(CASES[case].head_dim, **KINDS[kind])
    require_conform(backend, CASES[case], made, torch.float32, sinks=sinks)


@every_backend
@pytest.mark.parametrize("slots", [1, 2, 4097])
def test_a_single_row_in_bf16(backend: str, slots: int) -> None:
    """The flash kernel of the CPU takes such rows several times as slowly: every backend must go round it exactly."""
    case = Case(rows([slots], [2]), heads=8, kv_heads=8, head_dim=64)
    require_conform(backend, case, kind_of(64), torch.bfloat16, sinks=False)


@every_backend
def test_what_nobody_sees_is_not_read(backend: str) -> None:
    """A row whose window lies behind a whole segment: its slots may hold anything, and are not counted."""
    device = available_backends()[backend]
    layout = prefill(3, (50, 0, 0), (64, 0, 50))
    query, keys, values = drawn(Case(layout), torch.float32)
    keys[:, :50] = values[:, :50] = float("nan")
    prepared = make_backend(backend, torch.float32, device).prepare(layout, kind_of(16, window=60))
    got = prepared.attend(*(tensor.to(device) for tensor in (query, keys, values)), 0.25)
    assert got.isfinite().all()
    read, _ = prepared.layout.slots_read()
    assert read <= 64 + 3 or backend == "reference"


@every_backend
def test_the_pool_is_left_as_it_was(backend: str) -> None:
    device = available_backends()[backend]
    query, keys, values = (tensor.to(device) for tensor in drawn(Case(mixed()), torch.float32))
    before = [tensor.clone() for tensor in (query, keys, values)]
    make_backend(backend, torch.float32, device).prepare(mixed(), kind_of(16)).attend(query, keys, values, 0.25)
    assert all(torch.equal(one, two) for one, two in zip(before, (query, keys, values), strict=True))
