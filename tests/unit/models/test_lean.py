"""The lean pass: of which models, the same logits as the modelling code's, and that this serves where it has to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import save_adapter
from support.families import FAMILIES, save_tiny
from support.tiny import save_tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling
from choreo_agents.attention.layout import Layout, QuerySpan, Read
from choreo_agents.attention.step import StepAttention
from choreo_agents.errors import KVMemoryError
from choreo_agents.kv.pool import KVPool
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.lean import LeanForward, shape
from choreo_agents.native.library import available_kernels

pytestmark = pytest.mark.skipif(
    isinstance(available_kernels(), str), reason=f"there are no kernels: {available_kernels()}"
)
LEAN = ("granite", "llama", "llama-linear", "llama-llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "smollm3")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each lean pass."""
    passes: list[int] = []
    logits = LeanForward.logits

    def count(self: LeanForward, tokens: Tensor, *rest: Any) -> Tensor:
        passes.append(len(tokens))
        return logits(self, tokens, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LeanForward, "logits", count)
        yield passes


def talk(engine: Engine) -> list[tuple[int, ...]]:
    """Messages over messages that are reordered, moved and read by two; an answer to each."""
    one = engine.prefill(list(range(5, 60)))
    two = engine.prefill(list(range(70, 90)), parents=[one])
    answers: list[MessageHandle] = []
    for parents in ([one], [two, one], [two], [one, two]):
        drawn = Sampling(max_tokens=12, temperature=0.8, seed=len(parents))
        greedy = Sampling(max_tokens=12)
        answers += engine.decode(
            [Decode([3, 4], parents=parents, sampling=drawn), Decode([9], parents=parents[:1], sampling=greedy)]
        )
    return [tuple(engine.tokens(answer)) for answer in answers]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_that_are_built_so_are_served_and_the_others_say_why_not(tmp_path: Path, family: str) -> None:
    model = load_model(save_tiny(tmp_path, family, FAMILIES[family], seed=3))
    assert (model.adapter.lean is not None, model.fallback_reason is None) == ((family in LEAN,) * 2), (
        model.fallback_reason
    )


@pytest.mark.parametrize("family", LEAN)
def test_it_says_what_the_modelling_code_says(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny(tmp_path, family, FAMILIES[family], seed=5)
    lean, plain = load_model(path), load_model(path, prepacked=False)
    assert plain.adapter.lean is None and "prepacking is off" in (plain.fallback_reason or "")
    with counted(monkeypatch) as passes, Engine.load(lean, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        said = talk(engine)
        assert sum(passes) > 100, "the lean pass has served"
    with counted(monkeypatch) as passes, Engine.load(plain, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        assert talk(engine) == said and not passes


def test_a_model_that_multiplies_what_others_do_not_is_found_out(tmp_path: Path) -> None:
    settings = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
    model = load_model(save_tiny(tmp_path, "granite", settings, seed=3))
    assert model.adapter.lean is None and "something else than their modules suggest" in (model.fallback_reason or "")


@pytest.fixture
def tiny(tmp_path: Path) -> LoadedModel:
    return load_model(save_tiny_llama(tmp_path / "tiny"))


def logits_of(engine: Engine, tokens: list[int]) -> Tensor:
    seen: list[Tensor] = []
    engine.decode(tokens, sampling=Sampling(max_tokens=1), logits_callback=lambda logits: seen.append(logits.clone()))
    return seen[0]


def test_weights_that_have_changed_are_not_those_it_was_made_of(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(tiny) as engine:
        with counted(monkeypatch) as passes:
            before = logits_of(engine, [5, 6, 7])
        assert passes
        with torch.no_grad():
            tiny.adapter.model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
        with Engine.load(tiny) as other, counted(monkeypatch) as passes:
            assert not torch.equal(logits_of(other, [5, 6, 7]), before) and not passes
        assert tiny.computed_with(tiny.backend("auto")).startswith("transformers: its weights")


def test_a_norm_that_is_another_is_seen(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = tiny.adapter.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight * 2.0, requires_grad=False)
    with Engine.load(tiny) as engine, counted(monkeypatch) as passes:
        logits_of(engine, [5, 6, 7])
    assert not passes


def replace_product(model: Any) -> None:
    inner = model.model.layers[1].mlp
    inner.up_proj = torch.nn.Linear(inner.up_proj.in_features, inner.up_proj.out_features, bias=False)


def listen(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, given, out: out)


def listen_to_a_product(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda module, given: None)


def write_through_data(model: Any) -> None:
    weight = model.model.layers[0].input_layernorm.weight
    weight.data = weight.data * 2


def swap_layers(model: Any) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def add_a_bias(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.ones(96))


def scale_otherwise(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 1.0


def activate_otherwise(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def go_another_way(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: x


def replace_embedding(model: Any) -> None:
    model.set_input_embeddings(torch.nn.Embedding(model.config.vocab_size, model.config.hidden_size))


@pytest.mark.parametrize(
    "change",
    [
        replace_product,
        listen,
        listen_to_a_product,
        write_through_data,
        swap_layers,
        replace_embedding,
        add_a_bias,
        scale_otherwise,
        activate_otherwise,
        go_another_way,
    ],
)
def test_a_model_that_was_changed_is_computed_by_its_own_code(
    tiny: LoadedModel, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(tiny.adapter.model)
    with Engine.load(tiny) as engine, counted(monkeypatch) as passes:
        logits_of(engine, [5, 6, 7])
    assert not passes


def test_an_adapter_is_served_by_the_modelling_code(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(tmp_path / "adapter", tmp_path / "tiny")
    with Engine.load(tiny) as engine:
        engine.load_adapter(adapter, "tuned")
        with counted(monkeypatch) as passes:
            engine.decode([5, 6], adapter="tuned", sampling=Sampling(max_tokens=3))
            assert not passes
            engine.decode([5, 6], sampling=Sampling(max_tokens=3))
            assert passes


@pytest.mark.parametrize("backend", ["folded", "reference"])
def test_another_backend_is_served_by_the_modelling_code(
    tiny: LoadedModel, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(monkeypatch) as passes, Engine.load(tiny, backend=backend) as engine:
        said = talk(engine)
        assert not passes
    with Engine.load(tiny) as engine:
        assert talk(engine) == said


def test_gradients_flow_through_the_modelling_code(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tiny.adapter
    weight = adapter.model.model.layers[0].mlp.down_proj.weight.requires_grad_(True)
    pool = KVPool(adapter.geometry, 64 * adapter.geometry.bytes_per_token, adapter.device)
    layout = Layout((0, 1, 2), (0, 1, 2), (Read(0, 3, 0, (QuerySpan(0, 3, 0),), causal=True),))
    tokens, positions = torch.tensor([5, 6, 7]), torch.arange(3)
    for grad in (False, True):
        attention = StepAttention(layout, pool, tiny.backend("auto"), adapter.kinds)
        with counted(monkeypatch) as passes, torch.set_grad_enabled(grad):
            logits = adapter.traced_logits(tokens, positions, attention, torch.tensor([2]))
        assert bool(passes) is not grad and logits.requires_grad is grad
    logits.sum().backward()
    assert weight.grad is not None and bool(weight.grad.abs().sum() > 0)


def test_layers_that_are_wider_than_their_heads_say_are_left_to_their_own_code(tmp_path: Path) -> None:
    """A kernel would write beyond what is its own."""
    settings = {"layer_types": ["full_attention"] * 4}
    model = load_model(save_tiny(tmp_path, "qwen3_5_text", settings, seed=3))
    assert model.adapter.lean is None and "widths" in (model.fallback_reason or "")


def test_a_pool_that_was_given_up_is_not_read(tiny: LoadedModel) -> None:
    adapter = tiny.adapter
    pool = KVPool(adapter.geometry, 64 * adapter.geometry.bytes_per_token, adapter.device)
    layout = Layout((0,), (0,), (Read(0, 1, 0, (QuerySpan(0, 1, 0),)),))
    attention = StepAttention(layout, pool, tiny.backend("auto"), adapter.kinds)
    adapter.logits([5], [0], attention, [0])
    pool.give_up()
    with pytest.raises((KVMemoryError, IndexError)):
        adapter.logits([5], [0], attention, [0])


@pytest.mark.parametrize("threads", [1, 2])
def test_large_layers_are_laid_out_once_for_both(tmp_path: Path, threads: int) -> None:
    """What the kernel reads is what the modelling code's products read: the weights take no more memory than before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        path = save_tiny_llama(tmp_path, hidden_size=512, intermediate_size=768, num_hidden_layers=2)
        LlamaForCausalLM.from_pretrained(path).bfloat16().save_pretrained(path)
        lean, plain = (load_model(path, dtype=torch.float32, prepacked=prepacked) for prepacked in (True, False))
        layer = lean.adapter.model.model.layers[0]
        gate, up = layer.mlp.gate_proj.weight.choreo_panels, layer.mlp.up_proj.weight.choreo_panels
        assert up.panels.data_ptr() == gate.panels.data_ptr() + gate.panels.nbytes
        with Engine.load(lean) as one, Engine.load(plain) as other, Engine.load(lean, backend="folded") as third:
            error = (logits_of(one, [5, 6, 7]) - logits_of(other, [5, 6, 7])).abs().max()
            assert error <= 1e-4 and (logits_of(third, [5, 6, 7]) - logits_of(one, [5, 6, 7])).abs().max() <= 1e-4
        state = lean.adapter.model.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in plain.adapter.model.state_dict().items())
    finally:
        torch.set_num_threads(before)


def test_a_row_says_the_same_bit_by_bit_in_any_company(tiny: LoadedModel) -> None:
    """Rows over views of their own: no number of one depends on how many others share its step."""
    seen: dict[int, list[Tensor]] = {}

    def watched(number: int) -> Callable[[Tensor], None]:
        return lambda logits: seen.setdefault(number, []).append(logits.clone())

    def prompt(number: int) -> list[int]:
        return list(range(10 + number, 40 + number))

    with Engine.load(tiny) as engine:
        for number in range(7):
            engine.decode(prompt(number), sampling=Sampling(max_tokens=6), logits_callback=watched(number))
    alone, seen = seen, {}
    with Engine.load(tiny) as engine:
        calls = [Decode(prompt(n), sampling=Sampling(max_tokens=6), logits_callback=watched(n)) for n in range(7)]
        engine.decode(calls)
    for number in range(7):
        assert len(seen[number]) == 6
        for one, other in zip(alone[number], seen[number], strict=True):
            assert torch.equal(one, other), f"row {number} depends on its company"


def test_a_model_in_bfloat16_is_served_in_fp32_over_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says is nearer to what its weights say in doubles than what the modelling code says in bfloat16."""
    path = save_tiny_llama(tmp_path / "tiny")
    lean = load_model(path, dtype=torch.bfloat16)
    plain = load_model(path, dtype=torch.bfloat16, prepacked=False)
    doubles = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).double()
    tokens = list(range(5, 45))
    with torch.no_grad():
        wanted = doubles(torch.tensor([tokens])).logits[0, -1]
    errors: dict[str, float] = {}
    for name, model in (("lean", lean), ("plain", plain)):
        with counted(monkeypatch) as passes, Engine.load(model, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
            found = logits_of(engine, tokens)
            assert bool(passes) == (name == "lean")
        errors[name] = float((found.double() - wanted).norm() / wanted.norm())
    assert errors["lean"] < errors["plain"] and errors["lean"] <= 2e-2
    assert lean.adapter.geometry.dtype == torch.bfloat16


def test_bfloat16s_are_left_to_tiles_that_the_kernels_may_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape, "has_tiles", lambda: True)
    monkeypatch.setattr(shape, "multiply_tiles", lambda: False)
    model = load_model(save_tiny_llama(tmp_path / "tiny"), dtype=torch.bfloat16)
    assert model.adapter.lean is None and "tiles" in (model.fallback_reason or "")
    assert load_model(save_tiny_llama(tmp_path / "wide")).adapter.lean is not None
