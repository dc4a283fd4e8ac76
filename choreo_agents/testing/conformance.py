"""Conformance suite for attention backends: the same cases for each, compared with the readable reference.

A case is a layout over a pool of random keys and values. Tolerances, on outputs that are means of standard normal
values: 1e-5 in fp32, 0.06 in bf16, and an eighth of that in fp16, which has three more bits of mantissa.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from choreo_agents.attention.backends import AttentionBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.rope import Pairing, PureRotation

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.0075}


@dataclass(frozen=True)
class LayoutCase:
    """A step's layout, and the shape of the heads that read it."""

    layout: Layout
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16

    @property
    def slots(self) -> int:
        """Number of slots in its pool."""
        return max(read.start + read.length for read in self.layout.reads)


def rows(*lengths: list[int], shifts: Callable[[int], int] = lambda _: 0, own: int = 3) -> Layout:
    """Return a tree of segments, level by level, with as many decoding rows as leaves.

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
    """Return one row of `count` new tokens over parents given as (length, where encoded, where shown)."""
    reads: list[Read] = []
    slot = 0
    for length, native, shown in parents:
        reads.append(Read(slot, length, native, (QuerySpan(0, count, shown - native),)))
        slot += length
    start = max((shown + length for length, _, shown in parents), default=0)
    own = Read(slot, count, start, (QuerySpan(0, count, 0),), causal=True)
    return Layout(tuple(range(start, start + count)), tuple(range(count)), (*reads, own))


def mixed() -> Layout:
    """Return a prefill chunk and decodes in one step, with views that overlap, are no tree, and show one message twice.

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
    "no parents": LayoutCase(prefill(9)),
    "one token that sees itself": LayoutCase(prefill(1)),
    "one-token segments": LayoutCase(prefill(6, (1, 0, 3), (1, 7, 0), (1, 2, 9))),
    "many one-token segments": LayoutCase(rows(*[[1]] * 9, [1] * 3)),
    "a segment far away": LayoutCase(prefill(4, (33, 0, 100_000))),
    "a tree": LayoutCase(rows([7, 7], [9, 10, 11, 4])),
    "a ragged tree": LayoutCase(rows([7, 7], [9, 10, 11, 4], [129, 2, 1, 64, 65, 127, 3, 128])),
    "a tree with a missing branch": LayoutCase(rows([7, 7], [9, 0, 11, 4])),
    "a long trunk": LayoutCase(rows([16384], [1, 128, 256])),
    "a trunk shown at many places": LayoutCase(rows([700], [3] * 6, shifts=lambda row: 37 * row - 90)),
    "no tree": LayoutCase(mixed()),
    "one row": LayoutCase(rows([300], [40])),
    "many rows": LayoutCase(rows([513], [5] * 32)),
    "every head its own keys": LayoutCase(mixed(), heads=4, kv_heads=4),
    "one head of keys for all": LayoutCase(mixed(), heads=8, kv_heads=1),
    "wide heads": LayoutCase(mixed(), head_dim=128),
    "a chunk of prefill": LayoutCase(prefill(200, (600, 0, 0), (90, 10, 600))),
}

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without positions": {"rotation": None},
    "interleaved": {"pairing": "neighbours"},
    "partial": {"share": 0.5},
    "soft-capped": {"softcap": 20.0},
    "window of 1": {"window": 1},
    "window of 64": {"window": 64},
    "window of 4096": {"window": 4096},
}


def kind_of(head_dim: int, pairing: Pairing = "halves", share: float = 1.0, **changes: Any) -> AttentionKind:
    """Return a kind of layer that rotates that share of each head; `changes` are fields of `AttentionKind`."""
    turned = int(head_dim * share)
    frequencies = 1.0 / 10_000 ** (torch.arange(0, turned, 2) / turned)
    settings: dict[str, Any] = {"rotation": PureRotation(frequencies, pairing), "window": None, "softcap": None}
    return AttentionKind(**(settings | changes))


def drawn(case: LayoutCase, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values for a case."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(case.layout.positions), case.heads, case.head_dim, generator=generator)
    keys, values = torch.randn(2, case.kv_heads, case.slots, case.head_dim, generator=generator)
    return query.to(dtype), keys.to(dtype), values.to(dtype)


TELLING = ("no tree", "a ragged tree", "a chunk of prefill", "one-token segments")
"""Cases that every kind of layer is tested on."""


class BackendConformance:
    """Test suite for a backend: make a subclass whose name pytest collects, and return the backend from `backend`.

    class TestMine(BackendConformance):
        def backend(self, dtype):
            return MyBackend(dtype)
    """

    device = torch.device("cpu")
    """Device that the backend runs on."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Dtypes to test, a subset of `TOLERANCE`, the one with the most mantissa bits first."""
    skips_hidden = True
    """Whether it must skip what a window hides from all rows; a readable backend may read it."""

    def backend(self, dtype: torch.dtype) -> AttentionBackend:
        """Return the backend for KV of a dtype."""
        raise NotImplementedError(f"{type(self).__name__} must say which backend it is about")

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize tests (called by pytest): each case is a test of its own."""
        fixtures = {"case": CASES, "telling": TELLING, "kind": KINDS, "dtype": self.dtypes, "sinks": (False, True)}
        for name, values in (fixtures | {"slots": (1, 2, 4097)}).items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    def test_every_layout(self, case: str, dtype: torch.dtype) -> None:
        self.require_conforming(CASES[case], kind_of(CASES[case].head_dim), dtype)

    def test_every_kind_of_layer(self, telling: str, kind: str, sinks: bool) -> None:
        case = CASES[telling]
        self.require_conforming(case, kind_of(case.head_dim, **KINDS[kind]), self.dtypes[0], sinks=sinks)

    def test_a_single_row(self, slots: int, dtype: torch.dtype) -> None:
        """The CPU's flash kernel is several times slower on such bf16 rows; backends that work around it must be
        exact."""
        case = LayoutCase(rows([slots], [2]), heads=8, kv_heads=8, head_dim=64)
        self.require_conforming(case, kind_of(64), dtype)

    def test_what_nobody_sees_is_not_read(self) -> None:
        """A row whose window lies behind a whole segment must neither read nor count that segment's slots."""
        layout = prefill(3, (50, 0, 0), (64, 0, 50))
        query, keys, values = drawn(LayoutCase(layout), self.dtypes[0])
        keys[:, :50] = values[:, :50] = float("nan")
        prepared = self.backend(self.dtypes[0]).prepare(layout, kind_of(16, window=60))
        output = prepared.attend(*self._moved(query, keys, values), 0.25)
        assert output.isfinite().all(), "slots that no row sees have changed what rows read"
        read = sum(span.length for span in prepared.layout.reads)
        assert read <= 64 + 3 or not self.skips_hidden, f"{read} slots are read, of which 67 can be seen"

    def test_the_pool_is_left_as_it_was(self) -> None:
        tensors = self._moved(*drawn(LayoutCase(mixed()), self.dtypes[0]))
        before = [tensor.clone() for tensor in tensors]
        self.backend(self.dtypes[0]).prepare(mixed(), kind_of(16)).attend(*tensors, 0.25)
        same = [torch.equal(old, new) for old, new in zip(before, tensors, strict=True)]
        assert all(same), f"query, keys and values were left as they were: {same}"

    def require_conforming(
        self, case: LayoutCase, kind: AttentionKind, dtype: torch.dtype, *, sinks: bool = False
    ) -> None:
        """Assert that the backend's output equals the reference's, to within rounding."""
        query, keys, values = drawn(case, dtype)
        sink = torch.linspace(-2, 2, case.heads).to(dtype) if sinks else None
        scale = case.head_dim**-0.5
        expected = ReferenceBackend().prepare(case.layout, kind).attend(query, keys, values, scale, sink)
        prepared = self.backend(dtype).prepare(case.layout, kind)
        on_device = None if sink is None else sink.to(self.device)
        # Prepared tables are shared by all layers of a kind: the first call must not change what the second computes.
        other_inputs = drawn(case, dtype, seed=1)
        prepared.attend(*self._moved(*other_inputs), scale, on_device)
        out = prepared.attend(*self._moved(query, keys, values), scale, on_device)
        assert out.shape == expected.shape and out.dtype == dtype, f"{out.dtype}, {tuple(out.shape)} came back"
        error = (out.cpu().float() - expected.float()).abs().max().item()
        assert error <= TOLERANCE[dtype], f"{error} off, {TOLERANCE[dtype]} is rounding"

    def _moved(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query.to(self.device), keys.to(self.device), values.to(self.device)
