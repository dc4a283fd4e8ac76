"""Attention over packed traces: its gradients are those of what it computes."""

from __future__ import annotations

import random

import pytest
import torch
from support.traces import draw_trace, with_mapped
from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.rope import PureRotation
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.synthesis.mapper import CacheMapper
from choreo_agents.training.packed import PackedAttention, PackedTraces
from choreo_agents.training.trace import Trace, TraceMessage

HEADS, KV_HEADS, DIM = 4, 2, 6
TURNS = torch.tensor([0.7, 0.11])
KINDS = {
    "plain": AttentionKind(PureRotation(TURNS)),
    "interleaved, behind what does not turn": AttentionKind(PureRotation(TURNS, "neighbours", 2)),
    "no positions": AttentionKind(),
    "window": AttentionKind(PureRotation(TURNS), window=9),
    "softcap": AttentionKind(PureRotation(TURNS), softcap=1.5),
}


@pytest.mark.parametrize("name", ["window", *(pytest.param(n, marks=pytest.mark.slow) for n in KINDS if n != "window")])
@pytest.mark.parametrize("sunk", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_equal_finite_differences(name: str, sunk: bool) -> None:
    rng = random.Random(f"gradients {name} {sunk}")
    traces = [with_mapped(draw_trace(rng, 5, longest=4, name=str(number)), rng) for number in range(2)]
    packed = PackedTraces.of(traces)
    assert packed.mapped
    kinds = [KINDS[name]]
    torch.manual_seed(2)
    mapper = CacheMapper(KVGeometry(1, KV_HEADS, DIM, torch.float64), kinds).double()
    for parameter in mapper.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    count = len(packed.tokens)
    query, key, value, sinks = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((count, HEADS, DIM), (KV_HEADS, count, DIM), (KV_HEADS, count, DIM), (HEADS,))
    )
    attention = PackedAttention(packed, kinds, torch.device("cpu"), mapper)
    weights = torch.randn(count, HEADS, DIM, dtype=torch.float64)

    def attended(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *_: Tensor) -> Tensor:
        return (attention.attend(0, query, key, value, 0.5, sinks if sunk else None) * weights).sum()

    inputs = (query, key, value, sinks, *mapper.parameters())
    assert torch.autograd.gradcheck(attended, inputs, atol=1e-6)


def test_a_message_that_several_see_in_one_place_is_moved_there_once() -> None:
    first = TraceMessage("first", (5, 6, 7))
    others = [TraceMessage(name, (8, 9), ("first",), (offset,)) for name, offset in (("a", 4), ("b", 4), ("c", 0))]
    packed = PackedTraces.of([Trace("shared", (first, *others))])
    assert packed.moved == [0, 1, 2] and packed.shifts == [4, 4, 4]
    assert packed.seen == [0, 1, 2, 9, 10, 11, 3, 4, 9, 10, 11, 5, 6, 0, 1, 2, 7, 8]
