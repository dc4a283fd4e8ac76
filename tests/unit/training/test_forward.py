"""The differentiable pass over traces: gradients, neighbours, memory, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, save_tiny
from support.traces import draw_adapter, draw_mapper, draw_tokens, draw_trace, with_adapters, with_mapped
from torch import Tensor

from choreo_agents.errors import TrainingError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.trace import Trace, TraceMessage, batched

MakeModel = Callable[[str], LoadedModel]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Fresh ones: tests change their dtype, and whether they learn."""

    def make(family: str) -> LoadedModel:
        return load_model(save_tiny(tmp_path / family, family, FAMILIES[family], seed=4))

    return make


def draw_traces(seed: int, count: int = 3, messages: int = 7) -> list[Trace]:
    rng = random.Random(seed)
    return [draw_trace(rng, messages, name=str(number)) for number in range(count)]


@pytest.mark.parametrize("family", ["gpt_neox", "starcoder2"])
def test_gradients_equal_finite_differences(make_model: MakeModel, family: str) -> None:
    """In fp64, through every prefill and decode; of families whose norms do not round to fp32."""
    model = make_model(family)
    model.adapter.model.double().requires_grad_(True)
    rng = random.Random(8)
    traces = [with_adapters(with_mapped(trace, rng), [None, "one"], rng) for trace in draw_traces(8, 2, 6)]
    adapter, mapper = draw_adapter(model, "one", seed=1), draw_mapper(model, seed=2).double()
    forward = TraceForward(model, adapters={"one": adapter}, mapper=mapper)
    learnt = [
        *model.adapter.model.parameters(),
        *mapper.parameters(),
        *(part for low in adapter.parts.values() for part in (low.down, low.up)),
    ]
    forward.losses(traces).mean.backward()
    torch.manual_seed(0)
    for parts in (learnt, list(mapper.parameters()), learnt[-4:]):
        ways = [torch.randn_like(part) for part in parts]
        slope = sum((part.grad * way).sum().item() for part, way in zip(parts, ways, strict=True))
        ends = []
        with torch.no_grad():
            for step in (1e-6, -2e-6, 1e-6):
                ends.append(forward.losses(traces).mean.item())
                for part, way in zip(parts, ways, strict=True):
                    part.add_(step * way)
            measured = (ends[1] - ends[2]) / 2e-6
        assert slope == pytest.approx(measured, rel=1e-4), "the gradient is another than the loss's"


def gradients(forward: TraceForward, traces: list[Trace], parameters: list[Tensor]) -> list[Tensor]:
    loss = forward.losses(traces).mean
    return [*torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True), loss.detach()]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe", "gpt_oss"])
def test_checkpointing_gives_the_same_gradients(make_model: MakeModel, family: str) -> None:
    model = make_model(family)
    rng = random.Random(9)
    traces = [with_adapters(with_mapped(trace, rng), [None, "one"], rng) for trace in draw_traces(9)]
    adapter, mapper = draw_adapter(model, "one", seed=1), draw_mapper(model, seed=2)
    model.adapter.model.requires_grad_(True)
    learnt = [p for part in adapter.parts.values() for p in (part.down, part.up)]
    learnt += [*mapper.parameters(), *model.adapter.model.parameters()]
    kept, again = (
        gradients(TraceForward(model, adapters={"one": adapter}, mapper=mapper, checkpointed=way), traces, learnt)
        for way in (False, True)
    )
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)
    assert all(part.abs().max() > 0 for part in kept[: 2 * len(adapter.parts) + 6])
    assert "forward" not in vars(model.adapter.model.model.layers[0]), "the model is left as it was"


def test_a_checkpointed_graph_goes_back_twice(make_model: MakeModel) -> None:
    model, traces = make_model("llama"), draw_traces(9)
    model.adapter.model.requires_grad_(True)
    weight = model.adapter.model.lm_head.weight
    loss = TraceForward(model, checkpointed=True).losses(traces).mean
    inner = model.adapter.model.model.layers[0].mlp.up_proj.weight
    first = torch.autograd.grad(loss, [weight, inner], retain_graph=True)
    second = torch.autograd.grad(loss, [weight, inner])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_dropped_inputs_of_an_adapter_are_dropped_again(make_model: MakeModel) -> None:
    model = make_model("llama")
    traces = [with_adapters(trace, ["one"], random.Random(0)) for trace in draw_traces(10)]
    adapter = draw_adapter(model, "one", seed=1)
    adapter.dropout = 0.5
    learnt = [p for part in adapter.parts.values() for p in (part.down, part.up)]
    found = []
    for way in (False, True):
        torch.manual_seed(3)
        found.append(gradients(TraceForward(model, adapters={"one": adapter}, checkpointed=way), traces, learnt))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_only_what_is_checkpointed_is_computed_again(make_model: MakeModel) -> None:
    model, traces = make_model("llama"), draw_traces(9)
    model.adapter.model.requires_grad_(True)
    layer = model.adapter.model.model.layers[1].mlp.act_fn
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    for way, wanted in ((False, 1), (True, 2)):
        calls.clear()
        TraceForward(model, checkpointed=way).losses(traces).mean.backward()
        assert len(calls) == wanted


def test_a_trace_does_not_depend_on_its_neighbours(make_model: MakeModel) -> None:
    forward = TraceForward(make_model("llama"))
    traces = draw_traces(11, 6)
    with torch.no_grad():
        together = forward.logits(traces)
        sums = forward.losses(traces)
        for number, trace in enumerate(traces):
            alone = forward.logits([trace])
            error = (together.logits[together.owners == number] - alone.logits).abs().max().item()
            assert error <= 1e-5
            assert torch.equal(together.targets[together.owners == number], alone.targets)
            assert sums.sums[number].item() == pytest.approx(forward.losses([trace]).sums.item(), rel=1e-5)
            assert sums.counts[number] == trace.learnt_tokens


def test_losses_are_log_losses_of_the_learnt_tokens(make_model: MakeModel) -> None:
    model = make_model("llama")
    tokens = draw_tokens(random.Random(0), 20)
    message = TraceMessage("all", tokens, learn=(5, 12))
    with torch.no_grad():
        losses = TraceForward(model).losses([Trace("one", (message,))])
        model.adapter.model.set_attn_implementation("eager")
        logits = model.adapter.model(torch.tensor([tokens])).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[4:11], torch.tensor(tokens[5:12]), reduction="sum")
    assert losses.sums.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert losses.counts.tolist() == [7]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_neox", "gpt_oss"])
def test_layers_that_are_computed_again_keep_less(make_model: MakeModel, family: str) -> None:
    model = make_model(family)
    model.adapter.model.requires_grad_(True)
    traces = draw_traces(12, 4, 10)
    kept, again = (
        saved_bytes(lambda way=way: TraceForward(model, checkpointed=way).losses(traces).mean) for way in (False, True)
    )
    # Of what is computed again, one layer is there at a time.
    assert again + kept / model.adapter.geometry.layers < 0.8 * kept


def saved_bytes(compute: Callable[[], Tensor]) -> int:
    """Bytes of the tensors that autograd keeps, each storage once."""
    sizes: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(sizes.values())


def test_what_cannot_be_run_is_refused(make_model: MakeModel) -> None:
    forward = TraceForward(make_model("llama"))
    tokens = (5, 6, 7)
    with pytest.raises(TrainingError, match="no trace to run"):
        forward.losses([])
    for message, reason in (
        (TraceMessage("m", tokens, position=1022, learn=(1, 2)), "reaches position 1025, but the model's context is"),
        (TraceMessage("m", tokens, learn=(1, 2), adapter="tall"), r"needs adapter 'tall': loaded are only \[\]"),
        (TraceMessage("m", (5, 100_000), learn=(1, 2)), "invalid token ids"),
    ):
        with pytest.raises(TrainingError, match=reason):
            forward.losses([Trace("wrong", (message,))])
    copied = TraceMessage("copy", tokens, ("m",), (0,), mapped=True)
    with pytest.raises(TrainingError, match="has mapped messages: pass their mapper"):
        forward.losses([Trace("mapped", (TraceMessage("m", tokens, learn=(1, 2)), copied))])


def test_traces_are_cut_into_batches_under_a_budget() -> None:
    traces = draw_traces(13, 9)
    most = 2 * max(trace.tokens for trace in traces)
    batches = batched(traces, most)
    assert [trace for batch in batches for trace in batch] == traces
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert sum(trace.tokens for trace in batch) <= most
        if following is not None:
            assert sum(trace.tokens for trace in [*batch, following[0]]) > most, "the batch had room for it"
    assert [len(batch) for batch in batched(traces, 1)] == [1] * 9, "what is over the budget is a batch of its own"
