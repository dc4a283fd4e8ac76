"""The GPU's backend around kernels that a CPU plays: every dialect it may meet, and wrong ones that it must not use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from choreo_agents.attention.backends import make_backend, varlen
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.varlen import CHUNK, VarlenBackend, chunks
from choreo_agents.attention.layout import QuerySpan, Read
from choreo_agents.errors import InvalidRequestError
from choreo_agents.testing.conformance import CASES, KINDS, kind_of

CPU = torch.device("cpu")
Kernel = Callable[..., tuple[Tensor, Tensor]]


def played(*, in_place: bool, heads_first: bool) -> Kernel:
    """What the kernel's documentation says, one sequence at a time; without `in_place`, starts have to grow."""

    def kernel(q, k, v, from_q, from_k, most_q, most_k, *, scale, window_size, enable_gqa, seqused_k):
        assert q.is_contiguous() and from_q.dtype == from_k.dtype == torch.int32
        if not in_place and seqused_k is not None:
            raise NotImplementedError("seqused_k")
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        if not enable_gqa and q.shape[1] != k.shape[1]:
            raise RuntimeError("heads differ")
        for i in range(len(from_q) - 1):
            rows = slice(int(from_q[i]), int(from_q[i + 1]))
            length = int(from_k[i + 1] - from_k[i]) if seqused_k is None else int(seqused_k[i])
            seen = slice(int(from_k[i]), int(from_k[i]) + length)
            assert rows.stop - rows.start <= most_q and 0 < length <= most_k
            group = q.shape[1] // k.shape[1]
            key, value = (t[seen].repeat_interleave(group, dim=1).double() for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), key) * scale
            if window_size == (-1, 0):
                count = rows.stop - rows.start
                scores = scores.masked_fill(torch.ones(count, length, dtype=torch.bool).triu(length - count + 1), -1e30)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(q.dtype)
            lse[rows] = scores.logsumexp(-1).T.float()
        return out, lse.T.contiguous() if heads_first else lse

    return kernel


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("heads_first", [True, False])
def test_each_dialect_is_found_out(in_place: bool, heads_first: bool) -> None:
    backend = VarlenBackend.tried(torch.bfloat16, CPU, played(in_place=in_place, heads_first=heads_first))
    assert backend is not None
    assert (backend.dialect.in_place, backend.dialect.heads_first) == (in_place, heads_first)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_every_layout(case: str, in_place: bool) -> None:
    require_same(case, kind_of(CASES[case].head_dim), in_place=in_place)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", [False, True])
def test_every_kind_of_layer(kind: str, sinks: bool) -> None:
    for case in ("no tree", "a chunk of prefill"):
        require_same(case, kind_of(CASES[case].head_dim, **KINDS[kind]), in_place=True, sinks=sinks)


def require_same(name: str, kind, *, in_place: bool, sinks: bool = False) -> None:
    case = CASES[name]
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(case.layout.positions), case.heads, case.head_dim, generator=generator).bfloat16()
    keys, values = torch.randn(2, case.kv_heads, case.slots, case.head_dim, generator=generator).bfloat16()
    sink = torch.linspace(-2, 2, case.heads).bfloat16() if sinks else None
    backend = VarlenBackend.tried(torch.bfloat16, CPU, played(in_place=in_place, heads_first=True))
    assert backend is not None
    got = backend.prepare(case.layout, kind).attend(query, keys, values, 0.25, sink)
    wanted = ReferenceBackend().prepare(case.layout, kind).attend(query, keys, values, 0.25, sink)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert (got.float() - wanted.float()).abs().max() <= 0.06


def test_a_kernel_that_is_wrong_is_not_used() -> None:
    right = played(in_place=True, heads_first=True)

    def off(*tensors, **options):
        out, lse = right(*tensors, **options)
        return out, lse + 1.0 * (torch.arange(lse.shape[1]) % 2)

    def breaks(*_, **__):
        raise RuntimeError("no kernel image is available")

    for kernel in (off, breaks):
        assert VarlenBackend.tried(torch.bfloat16, CPU, kernel) is None


def test_what_the_machine_lacks_is_refused_by_name_and_gone_without_by_default(monkeypatch) -> None:
    monkeypatch.setattr(varlen, "torch_kernel", lambda: None)
    with pytest.raises(InvalidRequestError, match="varlen backend"):
        make_backend("varlen", torch.bfloat16, CPU)
    assert type(make_backend("auto", torch.bfloat16, CPU)).__name__ == "FoldedBackend"


def test_single_precision_goes_the_folded_way() -> None:
    assert VarlenBackend.tried(torch.float32, CPU, played(in_place=True, heads_first=True)) is None


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_chunks_are_the_read(length: int) -> None:
    read = Read(7, length, 40, (QuerySpan(0, 2, 5),))
    cut = chunks(read)
    assert [slot for piece in cut for slot in range(piece.start, piece.start + piece.length)] == list(
        range(7, 7 + length)
    )
    assert all(piece.length <= CHUNK and piece.position - piece.start == 33 for piece in cut)
