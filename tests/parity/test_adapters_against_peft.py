"""Tokens that an adapter serves have peft's logits, to 1e-4 in fp32, alone and beside rows of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import PeftOracle, save_adapter
from support.exact import TOLERANCE, exactly, plain_model
from support.families import FAMILIES, save_tiny
from torch import Tensor

from choreo_agents import Decode, Engine, Memory, MessageHandle, Prefill, Sampling, Scheduling
from choreo_agents.models.adapter_files import read_adapter, write_adapter

SERVED = ("llama", "qwen3", "phi3", "gpt_neox", "stablelm", "smollm3", "cohere", "gemma2", "qwen3_moe")
"""Grouped heads with norms on queries and keys, fused projections, partial and interleaved rotation, layers without
any, windows and soft-capping, experts beside adapted layers."""


@pytest.fixture(scope="module", params=SERVED)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, FAMILIES[request.param], seed=3)


@pytest.fixture(scope="module")
def adapters(model_path: Path) -> list[Path]:
    # Of a mixture's layers, peft's "all-linear" takes the experts too, which see a token or not.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if "moe" in model_path.name else "all-linear"
    return [save_adapter(model_path / f"a{seed}", model_path, seed=seed, target_modules=targets) for seed in (1, 2)]


@pytest.fixture(scope="module")
def oracle(model_path: Path, adapters: list[Path]) -> PeftOracle:
    return PeftOracle(model_path, adapters[0])


@pytest.fixture(scope="module")
def served(model_path: Path, adapters: list[Path]) -> Iterator[Engine]:
    """An engine with both adapters; its own calls have none."""
    with Engine.load(
        model_path, memory=Memory(kv_budget_bytes=1 << 23), scheduling=Scheduling(max_batched_tokens=16)
    ) as engine:
        assert [engine.load_adapter(folder) for folder in adapters] == ["a1", "a2"]
        yield engine
        engine.check()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama", {}, seed=3)


def draw(seed: int, *counts: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 360) for _ in range(count)] for count in counts]


def watched(
    engine: Engine, header: list[int], parents: list[MessageHandle], rest: list[int], **options: Any
) -> list[Tensor]:
    """The logits before each token of a forced decode."""
    seen: list[Tensor] = []
    call = Decode(
        header,
        parents,
        sampling=Sampling(forced_token_ids=tuple(rest)),
        logits_callback=lambda logits: seen.append(logits.clone()),
        **options,
    )
    engine.release(engine.decode([call])[0])
    return seen


def require_close(mine: list[Tensor], theirs: Tensor, most: float = TOLERANCE) -> None:
    error = (torch.stack(mine) - theirs).abs().max().item()
    assert error <= most, f"logits differ by {error}"


def test_a_chain_of_adapted_messages_equals_peft_on_the_concatenation(
    model_path: Path, adapters: list[Path], oracle: PeftOracle
) -> None:
    one, two, header, rest = draw(1, 30, 21, 3, 9)
    wanted = oracle.logits([*one, *two, *header, *rest])[-len(rest) - 1 : -1]
    with oracle.model.disable_adapter(), exactly():
        assert (oracle.logits([*one, *two, *header, *rest])[-1] - wanted[-1]).abs().max() > 0.1, "the adapter matters"
    with Engine.load(
        model_path,
        memory=Memory(kv_budget_bytes=1 << 23),
        scheduling=Scheduling(max_batched_tokens=16),
        adapter=adapters[0],
    ) as engine:
        first = engine.prefill(one)
        second = engine.prefill(two, [first])
        assert first.model == second.model != engine.model.adapter.fingerprint == first.base_model
        require_close(watched(engine, header, [first, second], rest), wanted)
        # Named, it is the same adapter: what it has encoded is found again.
        assert engine.prefill(one, adapter="a1") == first != engine.prefill(one, adapter="base")


def test_adapted_messages_over_what_the_base_has_encoded(served: Engine, oracle: PeftOracle) -> None:
    one, two, header, rest = draw(2, 24, 19, 2, 8)
    first = served.prefill(one)
    second = served.prefill(two, [first])
    wanted = oracle.mixed([([*one, *two], False), ([*header, *rest], True)])[-len(rest) - 1 : -1]
    require_close(watched(served, header, [first, second], rest, adapter="a1"), wanted)
    asked = served.prefill(two, [first], adapter="a1")
    wanted = oracle.mixed([(one, False), (two, True), ([*header, *rest], False)])[-len(rest) - 1 : -1]
    require_close(watched(served, header, [first, asked], rest, adapter="base"), wanted)


def test_rows_of_several_adapters_and_of_none_share_steps(served: Engine) -> None:
    root, tail = draw(3, 20, 9)
    parent = served.prefill(root)
    headers, rests = draw(4, 2, 3, 2, 5), draw(5, 7, 7, 7, 7)
    names = [None, "a1", "a2", "a1"]
    alone = [
        watched(served, header, [parent], rest, adapter=name)
        for header, rest, name in zip(headers, rests, names, strict=True)
    ]
    together: list[list[Tensor]] = [[] for _ in names]
    calls = [
        Decode(
            header,
            [parent],
            sampling=Sampling(forced_token_ids=tuple(rest)),
            logits_callback=lambda logits, seen=seen: seen.append(logits.clone()),
            adapter=name,
        )
        for header, rest, name, seen in zip(headers, rests, names, together, strict=True)
    ]
    before = served.stats()
    served.decode(calls)
    after = served.stats()
    assert after.decode_rows - before.decode_rows == 4 * (after.decode_steps - before.decode_steps) > 0
    for mine, theirs in zip(together, alone, strict=True):
        require_close(mine, torch.stack(theirs), 1e-5 * torch.stack(theirs).abs().max().item())
    assert (together[0][-1] - together[1][-1]).abs().max() > 0.1
    # Prefills too: one forward pass encodes the same words three ways.
    handles = served.prefill([Prefill(tail, [parent], adapter=name) for name in (None, "a1", "a2")])
    assert len({handle.id for handle in handles}) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}, "alpha_pattern": {"v_proj": 3, "layers.2": 5}},
        {"rank_pattern": {r"layers\.0\..*": 3}, "alpha_pattern": {"q_proj": 5}, "use_rslora": True},
        {"target_modules": ["q_proj"], "layers_to_transform": [1, 3]},
        {"target_modules": ["down_proj"], "lora_alpha": 1, "r": 1},
        {"target_modules": ["k_proj", "v_proj"], "init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=["rslora", "patterns", "both", "some layers", "rank 1", "gaussian", "orthogonal"],
)
def test_every_way_to_write_ranks_and_scales(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = save_adapter(tmp_path / "other", llama, seed=4, **options)
    one, header, rest = draw(6, 17, 2, 5)
    wanted = PeftOracle(llama, folder).logits([*one, *header, *rest])[-len(rest) - 1 : -1]
    with Engine.load(llama, memory=Memory(kv_budget_bytes=1 << 23), adapter=folder) as engine:
        require_close(watched(engine, header, [engine.prefill(one)], rest), wanted)


def test_an_adapter_of_ours_says_the_same_in_peft(llama: Path, tmp_path: Path) -> None:
    theirs = save_adapter(tmp_path / "theirs", llama, seed=5, target_modules=["q_proj", "o_proj", "up_proj"])
    model = plain_model(llama)
    parts = read_adapter(theirs, model, "f" * 16).parts
    write_adapter(tmp_path / "ours", parts, "f" * 16, name=str(llama), dropout=0.1)
    tokens = draw(7, 25)[0]
    one, two = (PeftOracle(llama, folder).logits(tokens) for folder in (theirs, tmp_path / "ours"))
    assert torch.equal(one, two)
    again = read_adapter(tmp_path / "ours", model, "f" * 16)
    assert again.fingerprint == read_adapter(theirs, model, "f" * 16).fingerprint
    assert again.parameters == sum(tensor.numel() for part in parts.values() for tensor in (part.down, part.up))
