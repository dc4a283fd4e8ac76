"""Weights laid out for the CPU give the same products, and step aside when they are not the layer's any more."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import save_tiny_llama
from torch import nn
from torch.nn import functional

from choreo_agents.models import load_model
from choreo_agents.models.weights import prepacked
from choreo_agents.models.weights.prepacked import Packed, PrepackedLinear, prepack

pytestmark = pytest.mark.skipif(
    not prepacked._can_lay_out(torch.float32), reason="this torch has no prepacked linear layers"
)


@pytest.fixture(autouse=True, params=["a kernel of our own", "oneDNN"])
def laid_out_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whose products are computed; in fp32 alone that can be chosen."""
    if request.param == "oneDNN":
        monkeypatch.setattr(prepacked, "_kernels", lambda: None)
    elif prepacked._kernels() is None:
        pytest.skip("there are no kernels of our own for this CPU")
    prepacked._can_lay_out.cache_clear()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        prepacked._can_lay_out(dtype)
    yield
    prepacked._can_lay_out.cache_clear()


def layer(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(384, 512, bias=bias).to(dtype).requires_grad_(False)


def packed_layer(**options: bool) -> nn.Linear:
    linear = layer(**options)
    assert prepack(nn.ModuleList([linear])) == 1 and isinstance(linear, PrepackedLinear)
    return linear


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[nn.Linear]:
    """Which layers have used their laid-out weights."""
    seen: list[nn.Linear] = []
    multiply = Packed.multiply
    monkeypatch.setattr(Packed, "multiply", lambda self, of, x: (seen.append(of), multiply(self, of, x))[1])
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 300])
def test_products_are_those_of_the_plain_layer(dtype: torch.dtype, bias: bool, rows: int, uses) -> None:
    plain, packed = layer(dtype, bias=bias), layer(dtype, bias=bias)
    if prepack(nn.ModuleList([packed])) == 0:
        pytest.skip(f"this processor lays out no {dtype}")
    uses.clear()
    x = torch.randn(1, rows, 384).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert (packed(x) - plain(x)).abs().max() <= tolerance
    assert {id(used) for used in uses} == {id(packed)}


def test_small_layers_stay_as_they_are() -> None:
    assert prepack(nn.ModuleList([nn.Linear(128, 128)])) == 0


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda linear: linear.weight.mul_(2.0),
    "assigned": lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(512, 384), requires_grad=False)),
    "data assigned": lambda linear: setattr(linear.weight, "data", linear.weight.data + 1),
    "another dtype": lambda linear: linear.to(torch.bfloat16),
    "loaded": lambda linear: linear.load_state_dict(nn.Linear(384, 512).state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_used(change: str, uses) -> None:
    linear = packed_layer()
    x = torch.randn(2, 384)
    linear(x)
    assert uses.pop() is linear
    uses.clear()
    CHANGES[change](linear)
    x = x.to(linear.weight.dtype)
    assert torch.equal(linear(x), functional.linear(x, linear.weight, linear.bias)) and not uses


@pytest.mark.parametrize("which", ["input", "weight", "bias"])
def test_gradients_flow(which: str) -> None:
    linear = packed_layer()
    x = torch.randn(2, 384)
    learnt = {"input": x, "weight": linear.weight, "bias": linear.bias}[which].requires_grad_(True)
    linear(x).sum().backward()
    assert learnt.grad is not None and learnt.grad.abs().sum() > 0


def test_autocast_is_obeyed() -> None:
    linear = packed_layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(2, 384)).dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_plain_layers(how: str, uses) -> None:
    linear = packed_layer()
    if how == "deepcopy":
        made = copy.deepcopy(linear)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(linear))
    else:
        file = io.BytesIO()
        torch.save(linear, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    uses.clear()
    x = torch.randn(2, 384)
    assert torch.equal(made(x), functional.linear(x, linear.weight, linear.bias)) and not uses
    assert prepack(nn.ModuleList([made])) == 1


def test_an_operator_that_is_wrong_for_a_shape_is_not_used_for_it(monkeypatch: pytest.MonkeyPatch, uses) -> None:
    one, other = packed_layer(), packed_layer()
    x = torch.randn(2, 384)
    monkeypatch.setattr(Packed, "multiply", lambda self, of, x: functional.linear(x, of.weight) * 1.01)
    for linear in (one, other, one):
        assert torch.equal(linear(x), functional.linear(x, linear.weight, linear.bias)) and not uses


def test_a_processor_that_cannot_lay_them_out_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("needs the cpu support avx512bw")

    monkeypatch.setattr(Packed, "_lay_out", refuses)
    prepacked._can_lay_out.cache_clear()
    linear = layer()
    assert prepack(nn.ModuleList([linear, layer()])) == 0 and type(linear) is nn.Linear


def replaced_layer() -> PrepackedLinear:
    linear = layer()
    assert prepack(nn.ModuleList([linear]), replacing=True) == 1 and isinstance(linear, PrepackedLinear)
    assert not prepacked.is_replaced(linear.weight), "nothing is laid out before it is used"
    linear(torch.randn(2, 384))
    assert prepacked.is_replaced(linear.weight), "the plain weights are gone"
    return linear


def test_weights_that_no_file_holds_are_replaced_and_come_back_bit_by_bit(uses) -> None:
    plain, linear = layer(), replaced_layer()
    x = torch.randn(2, 384)
    assert (linear(x) - plain(x)).abs().max() <= 1e-4 and uses[-1] is linear
    uses.clear()
    learnt = x.clone().requires_grad_(True)
    linear(learnt).sum().backward()
    assert learnt.grad is not None and learnt.grad.abs().sum() > 0
    assert torch.equal(linear.weight, plain.weight) and torch.equal(linear(x), plain(x)) and not uses


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "converted", "loaded"])
def test_replaced_weights_are_there_for_whoever_asks(how: str) -> None:
    plain, linear = layer(), replaced_layer()
    if how == "deepcopy":
        linear = copy.deepcopy(linear)
    elif how == "pickle":
        linear = pickle.loads(pickle.dumps(linear))
    elif how == "converted":
        plain, linear = plain.double(), linear.double()
    else:
        plain.weight.mul_(2.0)
        linear.load_state_dict(plain.state_dict())
    x = torch.randn(2, 384).to(plain.weight.dtype)
    assert torch.equal(linear.weight, plain.weight) and torch.equal(linear(x), plain(x))


def test_a_shared_weight_stays_while_its_other_owner_needs_it() -> None:
    embedding, head, inner = nn.Embedding(512, 384), layer(bias=False), layer()
    head.weight = embedding.weight.requires_grad_(False)
    model = nn.ModuleList([embedding, head, inner])
    assert prepack(model, replacing=True) == 2
    x = torch.randn(1, 384)
    wanted = functional.linear(x, embedding.weight)
    assert (head(x) - wanted).abs().max() <= 1e-3 and (inner(x), True)[1]
    assert (
        prepacked.is_replaced(inner.weight)
        and head.weight is embedding.weight
        and not prepacked.is_replaced(head.weight)
    )
    # Laid out beside the embedding it would be more than half of the model again.
    alone = nn.ModuleList([embedding, head])
    assert prepack(alone, replacing=True) == 0


def test_pages_of_a_file_stay_and_cost_nothing(tmp_path: Path) -> None:
    save_file({"weight": layer().weight}, tmp_path / "weights.safetensors")
    linear = layer()
    linear.weight = nn.Parameter(load_file(tmp_path / "weights.safetensors")["weight"], requires_grad=False)
    address = linear.weight.data_ptr()
    assert prepack(nn.ModuleList([linear]), replacing=True) == 1
    linear(torch.randn(2, 384))
    assert linear.weight.data_ptr() == address


def test_without_room_nothing_is_laid_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prepacked, "free_bytes", lambda device: 512 * 384 * 4)
    assert prepack(nn.ModuleList([layer()])) == 0
    assert "are not prepacked for the CPU" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_loads_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save_tiny_llama(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    packed, plain = load_model(path, dtype=dtype), load_model(path, dtype=dtype, prepacked=False)
    assert plain.prepacked == 0 and packed.adapter.fingerprint == plain.adapter.fingerprint
    if dtype == torch.float32:
        assert packed.prepacked == 2 * 3 + 1, "both layers' three large matrices, and the one of the output"


def test_what_stands_in_the_place_of_weights_is_neither_read_nor_written_unnoticed() -> None:
    linear = replaced_layer()
    if linear.weight.is_mkldnn:
        pytest.skip("torch itself refuses that")
    for read in (lambda: linear.weight + torch.ones(1), lambda: layer().weight.copy_(linear.weight)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()
    nn.init.zeros_(linear.weight)
    for use in (lambda: linear(torch.randn(2, 384)), linear.state_dict, lambda: copy.deepcopy(linear)):
        with pytest.raises(RuntimeError, match="prepacked=False to change its weights"):
            use()


def test_a_state_with_variables_keeps_what_is_laid_out(uses) -> None:
    plain, linear = layer(), replaced_layer()
    kept = linear.state_dict(keep_vars=True)["weight"]
    assert kept is linear.weight and torch.equal(prepacked.plain_weight(kept), plain.weight)
    assert torch.equal(linear.state_dict()["weight"], plain.weight) and prepacked.is_replaced(linear.weight)
