"""Both backends against attention computed from scratch, and the rotation that moves messages."""

import pytest
import torch
from torch import Tensor

from choreo_agents.attention.backends import folded, partial
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.rope import PureRotation

DIM = 8
FREQUENCIES = 1.0 / 10_000 ** (torch.arange(0, DIM, 2) / DIM)
ROTATION = PureRotation(FREQUENCIES)
KIND = AttentionKind(ROTATION)
CPU = torch.device("cpu")


def backends() -> list[FoldedBackend | ReferenceBackend]:
    return [FoldedBackend(torch.float32, CPU), ReferenceBackend()]


def encoded(raw: Tensor, positions: Tensor) -> Tensor:
    """[heads, tokens, dim] at their positions: Llama's RoPE, written with complex numbers instead."""
    half = DIM // 2
    turned = torch.complex(raw[..., :half].double(), raw[..., half:].double())
    angles = positions.double()[:, None] * FREQUENCIES.double()
    turned = turned * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1).float()


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: type(backend).__name__)
@pytest.mark.parametrize("shown_at", [0, 3, 40, 500])
def test_a_moved_message_is_seen_as_if_it_had_been_encoded_there(backend, shown_at: int) -> None:
    """Two tokens at 60 see five that were encoded from 20 on and are shown elsewhere, and themselves."""
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 2, DIM), torch.randn(2, 7, DIM), torch.randn(2, 7, DIM)
    own = torch.arange(60, 62)
    pool = torch.cat((encoded(key[:, :5], torch.arange(20, 25)), encoded(key[:, 5:], own)), dim=1)
    layout = Layout(
        positions=(60, 61),
        write_slots=(5, 6),
        reads=(Read(0, 5, 20, (QuerySpan(0, 2, shown_at - 20),)), Read(5, 2, 60, (QuerySpan(0, 2, 0),), causal=True)),
    )
    got = backend.prepare(layout, KIND).attend(encoded(query, own).transpose(0, 1), pool, value, 0.3)

    where = torch.cat((torch.arange(shown_at, shown_at + 5), own))
    queries, keys = encoded(query, own), encoded(key, where).repeat_interleave(2, dim=0)
    scores = queries @ keys.transpose(1, 2) * 0.3
    scores[:, 0, 6] = float("-inf")
    wanted = scores.softmax(-1) @ value.repeat_interleave(2, dim=0)
    assert (got - wanted.transpose(0, 1)).abs().max() < 1e-5


def test_spans_of_a_lone_read_may_come_in_any_order() -> None:
    """A layout does not say in which order the readers of a run are listed."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, DIM), torch.randn(2, 4, DIM), torch.randn(2, 4, DIM)
    layout = Layout((0, 1, 2), (0, 1, 2), (Read(0, 4, 0, (QuerySpan(1, 2, 0), QuerySpan(0, 1, 0))),))
    one, two = (backend.prepare(layout, KIND).attend(query, key, value, 0.3) for backend in backends())
    assert (one - two).abs().max() < 1e-5


def test_rope_pairs_dimensions_half_with_half_as_llama_does() -> None:
    torch.manual_seed(0)
    raw, positions = torch.randn(3, 5, DIM), torch.tensor([0, 1, 7, 300, 2000])
    cos, sin = ROTATION.cos_sin(positions)
    got = ROTATION.apply(raw.transpose(0, 1), cos, sin).transpose(0, 1)
    assert (got - encoded(raw, positions)).abs().max() < 1e-5


def test_cos_and_sin_of_far_positions_keep_their_precision() -> None:
    cos, sin = ROTATION.cos_sin(torch.tensor([10_000_001]))
    angle = 10_000_001 * FREQUENCIES.double()
    assert (cos - angle.cos()).abs().max() < 1e-6 and (sin - angle.sin()).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_rotation_keeps_dtype_and_length_of_a_vector(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(4, 2, DIM).to(dtype)
    moved = ROTATION.apply(vectors, *ROTATION.cos_sin(torch.tensor([0, -5, 17, 1000])))
    assert moved.dtype == dtype
    assert torch.equal(moved[0], vectors[0])
    assert torch.allclose(moved.norm(dim=-1), vectors.norm(dim=-1), rtol=2e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(
    ("read", "fits"),
    [
        (Read(0, folded.LONGEST_RUN, 0, (QuerySpan(0, folded.MOST_QUERIES, 0),)), True),
        (Read(0, folded.LONGEST_RUN + 1, 0, (QuerySpan(0, 1, 0),)), False),
        (Read(0, 4, 0, (QuerySpan(0, folded.MOST_QUERIES, 0), QuerySpan(40, 1, 0))), False),
        (Read(0, 4, 0, (QuerySpan(0, 4, 0),), causal=True), False),
        (Read(0, 4, 0, (QuerySpan(0, 4, 0),), window=3), False),
    ],
)
def test_only_short_runs_with_few_queries_are_packed(read: Read, fits: bool) -> None:
    assert folded.packable(read) is fits


@pytest.mark.parametrize("count", [1, folded.FEWEST_LONE_PACKED - 1, folded.FEWEST_LONE_PACKED, 30])
def test_the_number_of_kernel_calls_does_not_grow_with_short_runs(count: int, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(folded, "attend_padded", lambda *a: calls.append("padded") or partial.attend_padded(*a))
    monkeypatch.setattr(folded, "attend_run", lambda *a, **k: calls.append("run") or partial.attend_run(*a, **k))
    reads = tuple(Read(3 * i, 1 + i % 3, 0, (QuerySpan(i, 1, i),)) for i in range(count))
    query, pool = torch.randn(count, 2, DIM), torch.randn(2, 3 * count, DIM)
    backends()[0].prepare(Layout((0,) * count, (0,) * count, reads), KIND).attend(query, pool, pool, 1.0)
    assert calls == (["run"] * count if count < folded.FEWEST_LONE_PACKED else ["padded"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 4, 6], ids=lambda heads: f"{heads} heads over 2")
@pytest.mark.parametrize("rotation", [None, ROTATION, PureRotation(FREQUENCIES[:2], "neighbours", first=2)])
def test_rows_that_decode_alone_see_what_the_reference_sees(dtype, heads: int, rotation, monkeypatch) -> None:
    """Two rows, each with messages of its own at other places than they were encoded at, and one that both read."""
    torch.manual_seed(0)
    lone: list[int] = []
    attend_lone = folded.attend_lone
    monkeypatch.setattr(folded, "attend_lone", lambda *a: lone.append(len(a[3])) or attend_lone(*a))
    reads = (
        Read(0, 140, 5, (QuerySpan(0, 1, 300),)),
        Read(140, 3, 70, (QuerySpan(1, 1, -7),)),
        Read(150, 130, 0, (QuerySpan(0, 1, 11), QuerySpan(1, 1, 0))),
        Read(280, 9, 900, (QuerySpan(1, 1, 0),)),
        Read(290, 4, 900, (QuerySpan(0, 1, 0),)),
    )
    layout, kind = Layout((903, 908), (293, 288), reads), AttentionKind(rotation)
    query = torch.randn(2, heads, DIM).to(dtype)
    keys, values = torch.randn(2, 2, 300, DIM).to(dtype)
    got, wanted = (
        backend.prepare(layout, kind).attend(query, keys, values, 0.3)
        for backend in (FoldedBackend(dtype, CPU), ReferenceBackend())
    )
    assert (got - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert lone == ([4] if heads > 2 else []), "as many key heads as heads take the usual way"
