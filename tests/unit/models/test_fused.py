"""The fused pass, interpreted: of which models, and that it says what the modelling code says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import save_adapter
from support.families import FAMILIES, save_tiny
from torch import nn

from choreo_agents import Decode, Engine, Memory, Sampling
from choreo_agents.models import load_model
from choreo_agents.models.loader import LoadedModel

pytest.importorskip("triton", reason="the extra `kernels` is not installed: make test-triton installs it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make test-triton sets it", allow_module_level=True)

from choreo_agents.models.fused import FusedForward, forward

FUSED = ("llama", "qwen2", "qwen3", "smollm3")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each fused pass."""
    counted: list[int] = []
    logits = FusedForward.logits

    def count(self: FusedForward, tokens: Any, *rest: Any) -> Any:
        counted.append(len(tokens))
        return logits(self, tokens, *rest)

    monkeypatch.setattr(FusedForward, "logits", count)
    return counted


def spoken(model: LoadedModel, **call: Any) -> list[Any]:
    """Likelihoods over two messages, reordered and moved: of a prefill's last token and of what is said after it."""
    with Engine.load(model, memory=Memory(kv_budget_bytes=1 << 22), backend="triton") as engine:
        one = engine.prefill([*range(5, 16)], [])
        two = engine.prefill([*range(20, 25)], [one])
        sampling = Sampling(max_tokens=3, stop_tokens=(), logprobs=3)
        return [
            engine.logprobs(each) for each in engine.decode([Decode([3, 4], [two, one], sampling=sampling, **call)])
        ]


def off(one: list[Any], other: list[Any]) -> float:
    """How far apart likelihoods are of the same tokens, in nats."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=True):
        for here, there in zip(mine, theirs, strict=True):
            assert here.token == there.token
            worst = max(worst, abs(here.logprob - there.logprob))
    return worst


@pytest.mark.parametrize("family", FUSED)
def test_it_says_what_the_modelling_code_says(tmp_path: Path, family: str, passes: list[int]) -> None:
    path = save_tiny(tmp_path, family, FAMILIES[family], seed=5)
    fused = load_model(path, dtype=torch.float32, backend="triton")
    assert isinstance(fused.adapter.lean, FusedForward), fused.fallback_reason
    assert fused.computed_with(fused.backend("triton")) == "fused"
    said = spoken(fused)
    assert len(passes) > 4
    passes.clear()
    plain = load_model(path, dtype=torch.float32, backend="triton", prepacked=False)
    assert off(said, spoken(plain)) <= 1e-4 and not passes


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "phi", "cohere", "nanochat"])
def test_models_of_another_build_say_why_not(tmp_path: Path, family: str) -> None:
    model = load_model(save_tiny(tmp_path, family, FAMILIES[family]), dtype=torch.float32, backend="triton")
    assert model.adapter.lean is None and model.fallback_reason
    assert model.computed_with(model.backend("triton")).startswith("transformers: ")


def test_weights_side_by_side_are_still_the_models_own(tmp_path: Path, passes: list[int]) -> None:
    path = save_tiny(tmp_path, "qwen2", FAMILIES["qwen2"], seed=5)
    fused = load_model(path, dtype=torch.float32, backend="triton")
    plain = load_model(path, dtype=torch.float32, backend="triton", prepacked=False)
    mine, theirs = fused.adapter.model, plain.adapter.model
    for (name, weight), (_, other) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(weight, other), name
    attention = mine.get_decoder().layers[0].self_attn
    assert (
        attention.k_proj.weight.data_ptr() == attention.q_proj.weight[-1].data_ptr() + 4 * attention.q_proj.in_features
    )
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight * 2.0, requires_grad=False)
    passes.clear()
    spoken(fused)
    assert not passes, "they were made of other weights"


def test_calls_with_an_adapter_are_the_modelling_codes(tmp_path: Path, passes: list[int]) -> None:
    path = save_tiny(tmp_path, "llama", FAMILIES["llama"], seed=5)
    fused = load_model(path, dtype=torch.float32, backend="triton")
    folder = save_adapter(tmp_path / "adapter", path, seed=3)
    with Engine.load(fused, memory=Memory(kv_budget_bytes=1 << 22), backend="triton") as engine:
        engine.load_adapter(folder, name="other")
        passes.clear()
        engine.decode([Decode([3, 4], adapter="other", sampling=Sampling(max_tokens=2, stop_tokens=()))])
        assert not passes
        engine.decode([Decode([3, 4], sampling=Sampling(max_tokens=2, stop_tokens=()))])
        assert passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_between_products_beside_torch(dtype: torch.dtype) -> None:
    """Rows and widths that fill no block evenly."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    near = 1e-5 if dtype == torch.float32 else 0.002  # two of the steps of float16 at 2
    x, added, weight = drawn(5, 72), drawn(5, 72), drawn(72)
    for more in (None, added):
        own = x.clone()
        got = forward._normalise(own, more, weight, 1e-5)
        assert torch.equal(own, x if more is None else x + more)
        wide = own.float()
        wanted = (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).to(dtype) * weight
        assert (got.float() - wanted.float()).abs().max() <= near * 4
    both = drawn(3, 2 * 1300)
    wanted = nn.functional.silu(both[:, :1300]) * both[:, 1300:]
    assert (forward._gate(both).float() - wanted.float()).abs().max() <= near * 4
