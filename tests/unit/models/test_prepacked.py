"""Weights laid out for the CPU give the same products, and step aside when they are not the layer's any more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from choreo_agents.models import load_model, prepacked
from choreo_agents.models.prepacked import PrepackedLinear, prepack

pytestmark = pytest.mark.skipif(not prepacked._available(), reason="this torch has no prepacked linear layers")


def layer(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(384, 512, bias=bias).to(dtype).requires_grad_(False)


def require_packed(linear: nn.Linear) -> PrepackedLinear:
    assert prepack(nn.ModuleList([linear])) == 1
    assert isinstance(linear.forward, PrepackedLinear)
    return linear.forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 300])
def test_products_are_those_of_the_plain_layer(dtype: torch.dtype, bias: bool, rows: int) -> None:
    plain, packed = layer(dtype, bias=bias), layer(dtype, bias=bias)
    require_packed(packed)
    x = torch.randn(1, rows, 384).to(dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert (packed(x) - plain(x)).abs().max() <= tolerance


def test_small_layers_stay_as_they_are() -> None:
    assert prepack(nn.ModuleList([nn.Linear(128, 128)])) == 0


def test_changed_weights_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = layer()
    used = require_packed(linear)
    monkeypatch.setattr(used, "multiply", lambda x: pytest.fail("the old weights"))
    x = torch.randn(2, 384)
    with pytest.raises(pytest.fail.Exception):
        linear(x)
    linear.weight.mul_(2.0)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    other = layer()
    kept = require_packed(other)
    monkeypatch.setattr(kept, "multiply", lambda x: pytest.fail("the old weights"))
    other.weight = nn.Parameter(torch.ones(512, 384), requires_grad=False)
    assert torch.equal(other(x), torch.nn.functional.linear(x, other.weight, other.bias))


def test_gradients_flow() -> None:
    linear = layer()
    require_packed(linear)
    x = torch.randn(2, 384, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None and (x.grad - linear.weight.sum(0)).abs().max() < 1e-4
    linear.requires_grad_(True)
    linear(torch.randn(2, 384)).sum().backward()
    assert linear.weight.grad is not None


def test_a_wrong_operator_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = PrepackedLinear.multiply
    monkeypatch.setattr(PrepackedLinear, "multiply", lambda self, x: multiply(self, x) * 1.01)
    linear = layer()
    assert prepack(nn.ModuleList([linear])) == 0 and not isinstance(linear.forward, PrepackedLinear)


def test_a_loaded_model_has_its_large_layers_laid_out(tmp_path) -> None:
    from support.tiny import save_tiny_llama

    path = save_tiny_llama(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    packed, plain = load_model(path), load_model(path, prepacked=False)
    assert packed.prepacked == 2 * 3 + 1 and plain.prepacked == 0
    assert packed.adapter.fingerprint == plain.adapter.fingerprint
