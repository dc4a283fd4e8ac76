"""Adapters and mappers that cannot serve are refused with the reason; what is written is whole, or as it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeEngine
from safetensors.torch import load_file, save_file
from support.adapters import PeftOracle, random_mapper, save_adapter, save_mapper
from support.exact import plain_model
from support.families import FAMILIES, save_tiny
from support.tiny import save_tiny_llama
from torch import nn
from transformers.pytorch_utils import Conv1D

from choreo_agents import Engine, Memory, Sampling
from choreo_agents.errors import AdapterError
from choreo_agents.models import LoadedModel, adapter_files, load_model
from choreo_agents.models import files as tensor_files
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter, write_adapter
from choreo_agents.models.hook import pass_context
from choreo_agents.models.lora import LoraAdapter, LowRank, hook_layers
from choreo_agents.synthesis.mapper import MAPPER_FILE, CacheMapper, load_mapper
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.tuned import Tuned


@pytest.fixture(scope="module")
def good(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("good") / "good", tiny_path)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        (copy / file).write_bytes((good / file).read_bytes())
    return copy


def changed_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))


def changed_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], base: str | None = None) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE, None if base is None else {"base": base})


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name.replace("layers.0", "layers.77")] = tensors.pop(name)
    other = name.replace("lora_A", "lora_B")
    tensors[other.replace("layers.0", "layers.77")] = tensors.pop(other)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / CONFIG_FILE).unlink(), f"there is no {CONFIG_FILE} in"),
    "no weights": (lambda f: (f / WEIGHTS_FILE).unlink(), "cannot be read: No such file"),
    "weights cut": (lambda f: cut(f / WEIGHTS_FILE, 0.6), "is damaged"),
    "weights cut in the header": (lambda f: cut(f / WEIGHTS_FILE, 0.01), "is damaged"),
    "weights empty": (lambda f: cut(f / WEIGHTS_FILE, 0), "is damaged"),
    "weights of other bytes": (lambda f: (f / WEIGHTS_FILE).write_bytes(b"\xff" * 999), "is damaged"),
    "config cut": (lambda f: cut(f / CONFIG_FILE, 0.5), "cannot be read"),
    "config a list": (lambda f: (f / CONFIG_FILE).write_text("[1, 2]"), "cannot be read"),
    "config of no peft": (lambda f: (f / CONFIG_FILE).write_text('{"a": 1}'), "cannot be read"),
    "config of bytes": (lambda f: (f / CONFIG_FILE).write_bytes(b"\xff\xfe{"), "cannot be read"),
    "prompt tuning": (
        lambda f: (f / CONFIG_FILE).write_text('{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}'),
        "only LoRA is supported",
    ),
    "half a part": (lambda f: changed_tensors(f, lambda t: t.pop(next(iter(t)))), "is not plain LoRA"),
    "nothing in it": (lambda f: changed_tensors(f, lambda t: t.clear()), "is not plain LoRA: it has 'no lora_A'"),
    "a magnitude": (
        lambda f: changed_tensors(f, lambda t: t.update({"base_model.model.x.lora_magnitude_vector": torch.ones(3)})),
        "is not plain LoRA: it has 'base_model.model.x.lora_magnitude_vector'",
    ),
    "a layer that is not there": (lambda f: changed_tensors(f, renamed), "which the model does not have"),
    "flat tensors": (
        lambda f: changed_tensors(f, lambda t: t.update({k: v.flatten() for k, v in t.items()})),
        "with two matrices",
    ),
    "ranks that differ": (
        lambda f: changed_tensors(f, lambda t: t.update({k: v[:2] for k, v in t.items() if "lora_A" in k})),
        "is for another model",
    ),
    "other weights": (lambda f: changed_tensors(f, lambda _: None, "0123456789abcdef"), "'0123456789abcdef'"),
    "DoRA": (lambda f: changed_config(f, use_dora=True), "uses use_dora"),
    "biases": (lambda f: changed_config(f, bias="lora_only"), "uses bias"),
    "whole modules": (lambda f: changed_config(f, modules_to_save=["lm_head"]), "uses modules_to_save"),
    "biases of its own": (lambda f: changed_config(f, lora_bias=True), "uses lora_bias"),
    "PiSSA": (lambda f: changed_config(f, init_lora_weights="pissa_niter_4"), "uses init_lora_weights='pissa_niter_4'"),
    "aLoRA": (lambda f: changed_config(f, alora_invocation_tokens=[5]), "uses alora_invocation_tokens"),
    "a file instead": (lambda f: (f.rename(f.with_name("moved")), f.write_text("")), "there is no folder"),
    "nothing": (lambda f: f.rename(f.with_name("moved")), "there is no folder"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_adapter_that_cannot_serve_is_refused(make_engine: MakeEngine, folder: Path, name: str) -> None:
    damage, reason = DAMAGES[name]
    damage(folder)
    engine = make_engine()
    with pytest.raises(AdapterError, match=reason):
        engine.load_adapter(folder)
    assert engine.adapters == ()
    with pytest.raises(AdapterError, match=reason):
        make_engine(adapter=folder)
    assert engine.decode([7], sampling=Sampling(max_tokens=2)).length > 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"target_modules": ["lm_head", "q_proj"]}, "'lm_head': experts and the output layer are not supported"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "lora_embedding_A"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_peft_writes_and_cannot_be_served_is_refused(
    make_engine: MakeEngine, tiny_path: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    folder = save_adapter(tmp_path / "theirs", tiny_path, **options)
    with pytest.raises(AdapterError, match=reason):
        make_engine().load_adapter(folder)


def test_adapters_of_experts_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "moe", "qwen3_moe", FAMILIES["qwen3_moe"])
    folder = save_adapter(tmp_path / "theirs", path)
    engine = make_engine(path)
    with pytest.raises(AdapterError, match="experts and the output layer are not supported"):
        engine.load_adapter(folder)


def test_adapters_of_another_model_are_refused_with_both_fingerprints(
    make_engine: MakeEngine, tiny_path: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    wider = save_tiny_llama(tmp_path / "wider", hidden_size=96)
    with pytest.raises(
        AdapterError, match=r"is for another model: .* maps .* values in the model, but .* in the adapter"
    ):
        engine.load_adapter(save_adapter(tmp_path / "of-wider", wider))
    # Of the same shape: what we write says which weights it was trained beside.
    other = load_model(save_tiny_llama(tmp_path / "other", seed=9))
    parts = read_adapter(save_adapter(tmp_path / "theirs", tiny_path), plain_model(tiny_path), "").parts
    write_adapter(tmp_path / "ours", parts, other.adapter.weights, name="other", dropout=0.0)
    save_mapper(tmp_path / "mapper", other)
    mine, theirs = engine.model.adapter.weights, other.adapter.weights
    assert mine != theirs
    for what in ("ours", "mapper"):
        with pytest.raises(
            AdapterError, match=f"was trained for the weights '{theirs}', but this model's are '{mine}'"
        ):
            engine.load_adapter(tmp_path / what)
        with Engine.load(other, memory=Memory(kv_budget_bytes=1 << 20)) as at_home:
            assert at_home.load_adapter(tmp_path / what) == what


def test_an_adapter_is_written_alike_by_all_processes(tiny: LoadedModel, tmp_path: Path) -> None:
    """Peft keeps what is adapted as a set, whose order each process decides: runs tell adapters by their files."""
    Tuned(tiny, TuneSettings(rank=2)).save(tmp_path)
    written = json.loads((tmp_path / CONFIG_FILE).read_text())["target_modules"]
    assert len(written) == 7 and written == sorted(written)


def test_an_adapter_that_was_trained_in_fp32_serves_the_weights_in_bfloat16(tiny_path: Path, tmp_path: Path) -> None:
    trained = load_model(tiny_path, dtype=torch.float32)
    parts = read_adapter(save_adapter(tmp_path / "theirs", tiny_path), trained.adapter.model, "").parts
    write_adapter(tmp_path / "ours", parts, trained.adapter.weights, name="tiny", dropout=0.0)
    save_mapper(tmp_path / "ours", trained)
    with Engine.load(tiny_path, dtype=torch.bfloat16, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        assert engine.model.adapter.fingerprint != trained.adapter.fingerprint
        assert engine.load_adapter(tmp_path / "ours") == "ours"
        branch = engine.prefill([5, 6, 7], adapter="ours")
        assert engine.branches.merge([branch], adapter="ours", sampling=Sampling(max_tokens=2)).length > 1


NAMES: dict[str, tuple[Callable[[Engine, Path], object], str]] = {
    "an unknown one": (
        lambda e, _: e.prefill([5], adapter="nobody"),
        "adapter 'nobody' is not loaded: .* loaded: 'good'",
    ),
    "an unknown one, decoding": (lambda e, _: e.decode([5], adapter="nobody"), "adapter 'nobody' is not loaded"),
    "an unknown one, merging": (
        lambda e, _: e.branches.merge([e.prefill([5])], adapter="nobody"),
        "adapter 'nobody' is not loaded",
    ),
    "no mapper": (lambda e, _: e.branches.map([e.prefill([5])], adapter="good"), "cannot be mapped by 'good'"),
    "no mapper by default": (lambda e, _: e.branches.map([e.prefill([5])]), "cannot be mapped by None"),
    "the model's own": (lambda e, f: e.load_adapter(f, "base"), "the adapter name 'base' is reserved"),
    "none": (lambda e, f: e.load_adapter(f, ""), "the adapter name '' is reserved"),
    "another's": (lambda e, f: e.load_adapter(f, "good"), "the adapter name 'good' is taken by that of .*good"),
}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_names_are_refused(
    make_engine: MakeEngine, good: Path, tiny_path: Path, tmp_path: Path, name: str
) -> None:
    engine = make_engine()
    assert engine.load_adapter(good) == engine.load_adapter(good) == "good"
    other = save_adapter(tmp_path / "other", tiny_path, seed=2)
    call, reason = NAMES[name]
    with engine.scope(), pytest.raises(AdapterError, match=reason):
        call(engine, other)
    assert engine.adapters == ("good",) and engine.stats().messages == 0


def test_an_adapter_is_called_as_its_folder_however_that_is_named(
    make_engine: MakeEngine, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, link = tmp_path / "base", tmp_path / "latest"
    shutil.copytree(good, base)
    link.symlink_to(good)
    with pytest.raises(AdapterError, match=r"'base'.*rename the folder, or use load_adapter"):
        make_engine(adapter=base)
    monkeypatch.chdir(good)
    assert make_engine(adapter=".").adapters == ("good",)
    engine = make_engine()
    assert [engine.load_adapter("."), engine.load_adapter(link), engine.load_adapter(base, "x")] == [
        "good",
        "latest",
        "x",
    ]


def test_the_same_adapter_under_two_names_is_one(make_engine: MakeEngine, good: Path) -> None:
    engine = make_engine()
    engine.load_adapter(good, "one")
    engine.load_adapter(good, "two")
    assert engine.prefill([5, 6], adapter="one") == engine.prefill([5, 6], adapter="two")


MAPPER_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda f: f.unlink(), "there is no mapper.safetensors"),
    "cut": (lambda f: cut(f, 0.5), "is damaged"),
    "something else": (lambda f: save_file({"x": torch.ones(2)}, f), "is not a cache mapper: it has no key_down"),
    "a flat key_down": (lambda f: save_file({"key_down": torch.ones(2)}, f), "is not a cache mapper"),
    "a part too few": (
        lambda f: save_file({k: v for k, v in load_file(f).items() if k != "value_up"}, f),
        "does not fit the model: .*value_up",
    ),
    "another shape": (
        lambda f: save_file(load_file(f) | {"key_bias": torch.zeros(1, 2)}, f),
        "does not fit the model: .*key_bias",
    ),
    "a rank of too many": (
        lambda f: save_file(load_file(f) | {"key_down": torch.zeros(3, 999, 32)}, f),
        "rank must be from 1 to 32",
    ),
}


@pytest.mark.parametrize("name", MAPPER_DAMAGES)
def test_a_mapper_that_cannot_serve_is_refused(tiny: LoadedModel, tmp_path: Path, name: str) -> None:
    save_mapper(tmp_path, tiny)
    damage, reason = MAPPER_DAMAGES[name]
    damage(tmp_path / MAPPER_FILE)
    with pytest.raises(AdapterError, match=reason):
        load_mapper(tmp_path, tiny.adapter.geometry, tiny.adapter.kinds, tiny.adapter.weights)


def test_a_mapper_comes_back_as_it_was_saved(tiny: LoadedModel, tmp_path: Path) -> None:
    mapper = random_mapper(tiny, rank=5)
    mapper.save(tmp_path, tiny.adapter.weights)
    again = load_mapper(tmp_path, tiny.adapter.geometry, tiny.adapter.kinds, tiny.adapter.weights)
    assert again.fingerprint == mapper.fingerprint != random_mapper(tiny, rank=5, seed=2).fingerprint
    assert again.rank == 5 and not any(parameter.requires_grad for parameter in again.parameters())
    with pytest.raises(AdapterError, match="rank must be from 1 to 32"):
        CacheMapper(tiny.adapter.geometry, tiny.adapter.kinds, 33)


def test_a_write_that_fails_leaves_what_was_there(
    tiny: LoadedModel, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = read_adapter(save_adapter(tmp_path / "theirs", tiny_path), tiny.adapter.model, "").parts
    folder = tmp_path / "ours"
    write_adapter(folder, parts, "1" * 16, name="tiny", dropout=0.0)
    save_mapper(folder, tiny)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {CONFIG_FILE, WEIGHTS_FILE, MAPPER_FILE}
    other = {name: LowRank(part.down[:2] * 2, part.up[:, :2], 7.0) for name, part in parts.items()}

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_adapter(folder, other, "2" * 16, name="tiny", dropout=0.5)
    with pytest.raises(OSError, match="No space left"):
        save_mapper(folder, tiny, seed=2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr(adapter_files, "write_text", lambda path, _: full(None, path, None))
    with pytest.raises(OSError, match="No space left"):
        write_adapter(folder, other, "2" * 16, name="tiny", dropout=0.5)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


FULL_DISK = """
import resource, signal, sys, torch
from pathlib import Path
from choreo_agents.models.files import write_tensors
path = Path(sys.argv[1])
write_tensors(path, {"a": torch.ones(8)})
before = path.read_bytes()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_tensors(path, {"a": torch.zeros(1 << 16)})
except OSError as error:
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == [path.name], "not whole"
    print("refused")
"""


def test_a_file_that_the_system_does_not_let_grow_leaves_what_was_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "x.safetensors")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == "refused\n", ran.stderr


def test_adapters_that_threads_load_at_once_are_hooked_once(
    tiny_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_path)
    gate = threading.Barrier(8)
    register = nn.Module.register_forward_hook
    monkeypatch.setattr(nn.Module, "register_forward_hook", lambda *args: (time.sleep(0.0005), register(*args)))

    def load() -> None:
        gate.wait()
        read_adapter(good, model.adapter.model, "")

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(module._forward_hooks) for module in model.adapter.model.modules()} == {0, 1}


@torch.no_grad()
def test_a_part_adds_to_the_rows_it_serves_also_of_transposed_layers() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"conv": Conv1D(6, 4), "linear": nn.Linear(4, 6)}), torch.randn(1, 5, 4)
    part = LowRank(torch.randn(2, 4), torch.randn(6, 2), 0.5)
    adapter = LoraAdapter("a", "f" * 16, {"conv": part, "linear": part})
    plain = {name: layer(x) for name, layer in model.items()}
    hook_layers(model, ["conv", "linear"])
    added = x @ (part.up @ part.down).T * 0.5
    for name, layer in model.items():
        assert torch.equal(layer(x), plain[name])
        attention: Any = None
        with pass_context(attention, [(adapter, None)]):
            torch.testing.assert_close(layer(x), plain[name] + added)
        with pass_context(attention, [(adapter, torch.tensor([1, 3]))]):
            wanted = plain[name].clone()
            wanted[:, [1, 3]] += added[:, [1, 3]]
            torch.testing.assert_close(layer(x), wanted)
        assert torch.equal(layer(x), plain[name])


def test_the_oracle_sees_what_a_changed_base_would_do(tiny_path: Path, tmp_path: Path) -> None:
    """Why PiSSA is refused: its two matrices alone, beside the model's own weights, say something else."""
    folder = save_adapter(tmp_path / "pissa", tiny_path, init_lora_weights="pissa", target_modules=["q_proj"])
    theirs = PeftOracle(tiny_path, folder).logits([5, 6, 7, 8])
    changed_config(folder, init_lora_weights=True)
    assert (PeftOracle(tiny_path, folder).logits([5, 6, 7, 8]) - theirs).abs().max() > 0.1
