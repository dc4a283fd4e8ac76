"""The GPU's backend around kernels that a CPU plays: every dialect it may meet, and wrong ones that it must not use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from choreo_agents.attention import backends
from choreo_agents.attention.backends import make_backend, varlen, why_not_faster
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.trial import find_fault
from choreo_agents.attention.backends.varlen import CHUNK, Dialect, VarlenBackend, chunks, torch_kernel
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.errors import InvalidRequestError
from choreo_agents.testing.conformance import CASES, KINDS, kind_of

CPU = torch.device("cpu")
Kernel = Callable[..., tuple[Tensor, Tensor]]


def played(*, in_place: bool, heads_first: bool) -> Kernel:
    """What the kernel's documentation says, one sequence at a time; without `in_place`, starts have to grow."""

    def kernel(q, k, v, from_q, from_k, most_q, most_k, *, scale, causal, seqused_k):
        assert q.is_contiguous() and from_q.dtype == from_k.dtype == torch.int32
        if not in_place and seqused_k is not None:
            raise NotImplementedError("seqused_k")
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        for i in range(len(from_q) - 1):
            rows = slice(int(from_q[i]), int(from_q[i + 1]))
            length = int(from_k[i + 1] - from_k[i]) if seqused_k is None else int(seqused_k[i])
            seen = slice(int(from_k[i]), int(from_k[i]) + length)
            assert rows.stop - rows.start <= most_q and 0 < length <= most_k
            group = q.shape[1] // k.shape[1]
            key, value = (t[seen].repeat_interleave(group, dim=1).double() for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), key) * scale
            if causal:
                count = rows.stop - rows.start
                scores = scores.masked_fill(torch.ones(count, length, dtype=torch.bool).triu(length - count + 1), -1e30)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(q.dtype)
            lse[rows] = scores.logsumexp(-1).T.float()
        return out, lse.T.contiguous() if heads_first else lse

    return kernel


SMALL = HeadShape(2, 1, 16)


def tried(kernel: Kernel) -> VarlenBackend | str:
    return VarlenBackend.tried(torch.bfloat16, CPU, kernel, SMALL)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("heads_first", [True, False])
def test_each_dialect_is_found_out(in_place: bool, heads_first: bool) -> None:
    backend = tried(played(in_place=in_place, heads_first=heads_first))
    assert isinstance(backend, VarlenBackend)
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
    kernel = played(in_place=in_place, heads_first=True)
    backend = VarlenBackend(torch.bfloat16, CPU, kernel, Dialect(in_place, heads_first=True))
    got = backend.prepare(case.layout, kind).attend(query, keys, values, 0.25, sink)
    wanted = ReferenceBackend().prepare(case.layout, kind).attend(query, keys, values, 0.25, sink)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert (got.float() - wanted.float()).abs().max() <= 0.06


def shortened(least: int, by: int) -> Kernel:
    """Leaves out the last slots of each sequence that is not its queries' own and has at least so many."""
    right = played(in_place=True, heads_first=True)

    def kernel(*given, causal, seqused_k, **options):
        lengths = given[4].diff() if seqused_k is None else seqused_k
        used = seqused_k if causal else torch.where(lengths >= least, lengths - by, lengths)
        return right(*given, causal=causal, seqused_k=used, **options)

    return kernel


def off_by(nats: float) -> Kernel:
    right = played(in_place=True, heads_first=True)

    def kernel(*given, **options):
        out, lse = right(*given, **options)
        return out, lse + nats

    return kernel


def ahead(*given, causal, **options) -> tuple[Tensor, Tensor]:
    """Lets tokens see all of their own run."""
    return played(in_place=True, heads_first=True)(*given, causal=False, **options)


def breaks(*_, **__) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (shortened(1000, 8), "over 1023 slots, the kernel's output has a relative error of"),
        (shortened(1025, 1), "over 1025 slots, the kernel's output has a relative error of"),
        (shortened(128, 1), "over 128 slots, the kernel's output has a relative error of"),
        (off_by(0.05), "over 1 slots, the kernel's log-sum-exp is off by 5.0e-02"),
        (ahead, "over its own 63 slots, the kernel's output has a relative error of"),
        (breaks, "RuntimeError: no kernel image is available"),
    ],
    ids=["8 of long runs", "1 of the longest", "1 of 128", "log-sum-exp", "not causal", "none"],
)
def test_a_kernel_that_is_wrong_is_not_used_and_it_is_said_why(kernel: Kernel, complaint: str) -> None:
    assert complaint in tried(kernel)


def test_a_kernel_that_begins_at_even_slots_is_given_its_keys_gathered() -> None:
    right = played(in_place=True, heads_first=True)

    def kernel(query, keys, values, from_q, from_k, *rest, seqused_k, **options):
        starts = from_k if seqused_k is None else from_k // 2 * 2
        return right(query, keys, values, from_q, starts, *rest, seqused_k=seqused_k, **options)

    backend = tried(kernel)
    assert isinstance(backend, VarlenBackend) and not backend.dialect.in_place


@dataclass(frozen=True)
class PlayedOperator:
    """torch's operator, with the arguments that one torch or another has."""

    more: tuple[str, ...]
    asked: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    @property
    def _schema(self) -> Any:
        names = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
        return SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in (*names, *self.more)])

    @property
    def default(self) -> PlayedOperator:
        return self

    def __call__(self, *given, scale, seqused_k=None, **options):
        self.asked.append((len(given), options))
        tensors, (dropout, causal, debugged) = given[:7], given[7:]
        assert (dropout, debugged) == (0.0, False) and set(options) <= {*self.more}
        kernel = played(in_place="seqused_k" in self.more, heads_first=True)
        return *kernel(*tensors, scale=scale, causal=causal, seqused_k=seqused_k), None, None, None


@pytest.mark.parametrize("more", [("seqused_k",), ("seqused_k", "block_table", "num_splits"), ("num_splits",), ()])
def test_the_operator_is_called_by_its_own_schema(monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    operator = PlayedOperator(more)
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(_flash_attention_forward=operator))
    kernel = torch_kernel.__wrapped__()
    assert callable(kernel)
    backend = tried(kernel)
    assert isinstance(backend, VarlenBackend) and backend.dialect.in_place == ("seqused_k" in more)
    splits = {"num_splits": 1} if "num_splits" in more else {}
    assert all(asked == (10, splits) for asked in operator.asked)


def test_this_torch_has_the_operator() -> None:
    assert callable(torch_kernel.__wrapped__())
    with pytest.raises(NotImplementedError, match="CPU"):
        torch_kernel.__wrapped__()(
            *torch.zeros(3, 1, 1, 16), *torch.zeros(2, 2).int(), 1, 1, scale=1.0, causal=False, seqused_k=None
        )


def test_another_operator_or_none_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(PlayedOperator):
        @property
        def _schema(self) -> Any:
            return SimpleNamespace(arguments=[SimpleNamespace(name="query")])

    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(_flash_attention_forward=Other(())))
    assert "has no cum_seq_k, cum_seq_q" in str(torch_kernel.__wrapped__())
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace())
    assert "has no aten::_flash_attention_forward" in str(torch_kernel.__wrapped__())


def test_what_the_machine_lacks_is_refused_by_name_and_gone_without_by_default(monkeypatch) -> None:
    monkeypatch.setattr(varlen, "torch_kernel", lambda _: "varlen: it is away")
    with pytest.raises(InvalidRequestError, match='varlen: it is away; use backend="auto"'):
        make_backend("varlen", torch.bfloat16, CPU)
    assert type(make_backend("auto", torch.bfloat16, CPU)) in (FoldedBackend, NativeBackend)
    on_gpu = make_backend("auto", torch.bfloat16, torch.device("cuda"))
    assert type(on_gpu) is FoldedBackend and why_not_faster(on_gpu) == "varlen: it is away"
    assert why_not_faster(make_backend("folded", torch.bfloat16, CPU)) == ""


@pytest.mark.parametrize(("capability", "first"), [((9, 0), "triton"), ((8, 0), "varlen"), ((10, 0), "varlen")])
def test_our_kernels_serve_by_default_where_they_have_passed(monkeypatch: Any, capability: Any, first: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    asked: list[str] = []

    def maker(name: str, answer: Any) -> Any:
        return lambda *_: asked.append(name) or answer

    there = FoldedBackend(torch.bfloat16, CPU)
    makers = {"triton": maker("triton", "triton: it is away"), "varlen": maker("varlen", there)}
    monkeypatch.setattr(backends, "_MAKERS", makers)
    assert make_backend("auto", torch.bfloat16, torch.device("cuda")) is there
    assert asked == [*dict.fromkeys([first, "varlen"])], "what cannot be had is gone without"


def test_single_precision_goes_the_folded_way() -> None:
    right = played(in_place=True, heads_first=True)
    assert "float16 and bfloat16" in VarlenBackend.tried(torch.float32, CPU, right, SMALL)
    assert "float16 and bfloat16" in why_not_faster(make_backend("auto", torch.float32, torch.device("cuda")))


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_chunks_are_the_read(length: int) -> None:
    read = Read(7, length, 40, (QuerySpan(0, 2, 5),))
    cut = chunks(read)
    assert [slot for piece in cut for slot in range(piece.start, piece.start + piece.length)] == list(
        range(7, 7 + length)
    )
    assert all(piece.length <= CHUNK and piece.position - piece.start == 33 for piece in cut)


def test_where_torch_alone_multiplies_tiles_it_does_so_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "multiply_tiles", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert type(make_backend("auto", torch.bfloat16, CPU)) is FoldedBackend
    fast = make_backend("auto", torch.float32, CPU)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert (
        type(make_backend("auto", torch.bfloat16, CPU)) is type(fast) is type(make_backend("auto", torch.float32, CPU))
    )


class Stubborn(PlayedOperator):
    """Names an argument that its kernel does not take."""

    def __call__(self, *given, **options):
        if "num_splits" in options:
            raise RuntimeError("num_splits requires another kernel")
        return super().__call__(*given, **options)


def test_an_argument_that_is_named_and_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Stubborn(("seqused_k", "num_splits"))
    monkeypatch.setattr(torch.ops, "aten", SimpleNamespace(_flash_attention_forward=operator))
    monkeypatch.setattr(varlen, "torch_kernel", torch_kernel.__wrapped__)
    backend = VarlenBackend.tried(torch.bfloat16, CPU, shape=HeadShape(4, 2, 16))
    assert isinstance(backend, VarlenBackend) and operator.asked
    assert all(options == {} for _, options in operator.asked)


class Spoilt:
    """The reference in halves, but for what is spoilt of a step."""

    def __init__(self, spoil: Callable[..., None], *, stores: bool = False) -> None:
        self.spoil, self.stores = spoil, stores

    def prepare(self, layout: Layout, kind: AttentionKind) -> Any:
        right, spoil = ReferenceBackend().prepare(layout, kind), self.spoil

        class Prepared:
            def attend(self, query, keys, values, scale, sinks=None):
                out = right.attend(query, keys, values, scale, sinks)
                spoil(out, layout, kind)
                return out

            if self.stores:

                def store(self, heads, key, value, keys, values):
                    keys[:, list(layout.write_slots)] = key  # and no values

        return Prepared()


def of_prefills(out: Tensor, layout: Layout, kind: AttentionKind) -> None:
    out[-20:] *= 1.1


def of_capped_layers(out: Tensor, layout: Layout, kind: AttentionKind) -> None:
    out *= 1.0 if kind.softcap is None else 1.1


def of_windows(out: Tensor, layout: Layout, kind: AttentionKind) -> None:
    out *= 1.0 if kind.window is None else 1.1


def of_nothing(out: Tensor, layout: Layout, kind: AttentionKind) -> None: ...


@pytest.mark.parametrize("spoilt", [Spoilt(of_prefills), Spoilt(of_capped_layers), Spoilt(of_windows)])
def test_what_is_wrong_in_some_steps_only_is_found(spoilt: Spoilt) -> None:
    said = find_fault(spoilt, HeadShape(4, 2, 16), torch.bfloat16, CPU)
    assert said is not None and "off by" in said


def test_keys_and_values_that_are_not_stored_are_found() -> None:
    assert find_fault(Spoilt(of_nothing), HeadShape(4, 2, 16), torch.bfloat16, CPU) is None
    assert "off by" in (find_fault(Spoilt(of_nothing, stores=True), HeadShape(4, 2, 16), torch.bfloat16, CPU) or "")
