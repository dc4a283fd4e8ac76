"""What cannot be loaded says so in one line, by its name, and before weights are read where a small file tells."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantised import compressed, on_torchao
from support.tiny import save_tiny_llama
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from typer.testing import CliRunner

from choreo_agents import Engine, Memory, Sampling
from choreo_agents.cli import app
from choreo_agents.errors import ChoreoError, UnsupportedModelError
from choreo_agents.models import load_model
from choreo_agents.models.checking import check_model
from choreo_agents.models.weights import quantized

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
BY_CONFIGURATION: Mapping[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": ({}, "latent"),
    "glm4_moe_lite": ({}, "latent"),
    "gemma4_text": ({}, "head sizes 256 and 512"),
    "ministral3": ({}, "scaled by their absolute position"),
    "llama4_text": ({}, "scaled by their absolute position"),
    "phi3": (
        {"rope_parameters": LONGROPE, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
        "'longrope'",
    ),
    "qwen2": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"] * 16}, "recurrent layers"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 16}, "recurrent layers"),
    "qwen3_next": ({}, "recurrent layers"),
    "qwen3_5": ({}, "recurrent layers"),
    "nemotron_h": ({}, "recurrent layers"),
    "qwen3_vl": ({}, "a tower for vision"),
    "qwen2_5_vl": ({}, "a tower for vision"),
    "mistral3": ({}, "a tower for vision"),
}
"""Settings of a configuration, and what is said of it."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Large enough for weights to be laid out for the CPU.
    shape = {"hidden_size": 384, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    return save_tiny_llama(tmp_path_factory.mktemp("plain"), **shape)


def changed(plain: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    return configured(folder, **settings)


def configured(folder: Path, **settings: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def require_one_line(name: Path | str, *words: str, dtype: torch.dtype | None = None, by_command: bool = True) -> None:
    """The model is refused with these words, by the library and, without a traceback, by a command."""
    with pytest.raises((ChoreoError, OSError)) as refusal:
        load_model(name, dtype=dtype)
    said = str(refusal.value)
    assert "\n" not in said and all(word in said for word in words), said
    if dtype is None and by_command:
        result = CliRunner().invoke(app, ["models", "check", str(name)], env={"COLUMNS": "1000"})
        assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("family", BY_CONFIGURATION)
def test_a_configuration_is_refused_before_there_are_weights(tmp_path: Path, family: str) -> None:
    settings, reason = BY_CONFIGURATION[family]
    AutoConfig.for_model(family, **settings).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("method", "package", "settings"),
    [
        ("awq", "gptqmodel", {}),
        ("gptq", "optimum", {"bits": 4}),
        ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
        ("hqq", "hqq", {}),
        ("vptq", "vptq", {}),
    ],
)
def test_a_quantisation_whose_package_is_missing_names_it_and_the_extra(
    plain: Path, tmp_path: Path, method: str, package: str, settings: dict[str, Any]
) -> None:
    folder = changed(plain, tmp_path, quantization_config={"quant_method": method} | settings)
    (folder / "model.safetensors").unlink()
    require_one_line(folder, f"quantised with {method!r}", package, "choreo-agents[quantized]")


def test_old_spellings_of_a_quantisation_are_known() -> None:
    assert quantized.method_of({"load_in_4bit": True}) == quantized.method_of({"quant_method": "bitsandbytes_8bit"})


def test_a_quantisation_that_nobody_knows_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path, quantization_config={"quant_method": "abacus"})
    require_one_line(folder, "quantised with 'abacus'", "torchao")


def test_gguf_is_refused_as_a_file_and_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "model.Q4_K_M.gguf", str(tmp_path / "model.Q4_K_M.gguf"), "somebody/model.gguf"):
        require_one_line(name, "GGUF", "safetensors", "choreo-agents[quantized]")


def test_code_that_a_model_brings_along_is_not_run(plain: Path, tmp_path: Path) -> None:
    own = {"model_type": "abacus", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    folder = changed(plain, tmp_path, **own)
    (folder / "code.py").write_text("raise SystemExit('it was run')")
    require_one_line(folder, "custom code, which is not executed")


def without(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def indexed(folder: Path, index: str) -> None:
    without(folder, "*.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)


def headed(folder: Path, header: str) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())


def no_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DAMAGES: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda folder: without(folder, "config.json"), "there is no config.json"),
    "a broken one": (lambda folder: (folder / "config.json").write_text("{"), "not a valid JSON file"),
    "an unknown type": (lambda folder: configured(folder, model_type="abacus"), "the model type of"),
    "no language model": (lambda folder: configured(folder, model_type="t5"), "encoder-decoder"),
    "no tokenizer": (lambda folder: without(folder, "tokenizer*"), "there is no tokenizer.json"),
    "a setting of another kind": (
        lambda folder: configured(folder, hidden_size="64"),
        "'hidden_size': TypeError: Field 'hidden_size' expected int",
    ),
    "a broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "the tokenizer of"),
    "broken generation settings": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "the generation settings of",
    ),
    "not finite": (no_numbers, "the model's logits in torch.float32 are not finite: its weights are damaged"),
    "cut weights": (lambda folder: cut(folder / "model.safetensors"), "are damaged"),
    "no weights": (lambda folder: without(folder, "*.safetensors"), "model.safetensors"),
    "missing weights": (lambda folder: configured(folder, num_hidden_layers=3), "incomplete: 9 are missing"),
    "other shapes": (lambda folder: configured(folder, intermediate_size=64), "have other shapes"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_in_a_line(plain: Path, tmp_path: Path, damage: str) -> None:
    break_it, reason = DAMAGES[damage]
    folder = changed(plain, tmp_path / "model")
    break_it(folder)
    # The command does without weights.
    require_one_line(folder, reason, by_command=damage != "no weights")


@pytest.mark.parametrize("error", [KeyError("experts"), ImportError("no kernel\nat all"), RuntimeError("a\nb\nc")])
def test_layers_that_cannot_be_run_are_named_in_a_line(
    plain: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(LlamaMLP, "forward", fails)
    require_one_line(plain, f"LlamaForCausalLM cannot be run on tokens: {type(error).__name__}")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named_in_a_line(plain: Path, tmp_path: Path, index: str) -> None:
    folder = changed(plain, tmp_path)
    indexed(folder, index)
    require_one_line(folder, str(tmp_path), by_command=False)
    require_checked_in_a_line(folder, "model.safetensors.index.json' is damaged")


@pytest.mark.parametrize("header", ["{", "[]", '{"a": 3}', '{"a": {"dtype": "F32"}}'])
def test_a_damaged_header_is_named_in_a_line(plain: Path, tmp_path: Path, header: str) -> None:
    folder = changed(plain, tmp_path)
    headed(folder, header)
    require_one_line(folder, f"the weights of {str(folder)!r} are damaged")


def require_checked_in_a_line(folder: Path, words: str) -> None:
    result = CliRunner().invoke(app, ["models", "check", str(folder)], env={"COLUMNS": "1000"})
    assert result.exit_code == 2 and words in result.output and isinstance(result.exception, SystemExit)


def test_numbers_that_do_not_fit_a_dtype_are_said_to_be_none(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder)
    require_one_line(folder, "in torch.float16 are not finite: use bfloat16 or float32", dtype=torch.float16)


def test_what_lies_beside_the_files_of_a_model_does_not_matter(plain: Path, tmp_path: Path) -> None:
    """Links to nowhere, and the same weights in another format."""
    folder = changed(plain, tmp_path)
    size = check_model(folder).memory.weights
    for name in ("notes.json", "notes.safetensors"):
        (folder / name).symlink_to(tmp_path / "nowhere")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert load_model(folder).adapter.fingerprint == load_model(plain).adapter.fingerprint
    assert check_model(folder).memory.weights == size


def in_fp8(plain: Path, folder: Path) -> Path:
    """The same in blocks of FP8 numbers, as DeepSeek's and Qwen's are."""
    shutil.copytree(plain, folder)
    kept: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if "proj" not in name:
            kept[name] = weight.bfloat16()
            continue
        blocks = weight.view(weight.shape[0] // 64, 64, weight.shape[1] // 64, 64)
        scales = blocks.abs().amax((1, 3)) / 448
        kept[name] = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        kept[f"{name}_scale_inv"] = scales
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [64, 64], "activation_scheme": "dynamic", "fmt": "e4m3"}
    return configured(folder, dtype="bfloat16", quantization_config=how)


def nbytes(tensor: torch.Tensor) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(nbytes(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])


def require_served(folder: Path, plain: Path, **options: Any) -> None:
    """It decodes, is told from others by its weights, and says about what the plain model says."""
    with Engine.load(folder, memory=Memory(kv_budget_bytes=1 << 20), **options) as engine:
        text = engine.text(engine.decode("A text.", sampling=Sampling(max_tokens=2)))
        told = engine.model.adapter
        prompt = engine.model.prompt.logits
    assert text.startswith("A text.")
    # Compressed-tensors makes them in its first forward pass.
    assert not any(weight.is_inference() for weight in told.model.parameters())
    taken = sum(map(nbytes, told.model.state_dict().values()))
    assert check_model(folder, **options).memory.weights == pytest.approx(taken, rel=0.05)
    other = load_model(plain)
    assert told.fingerprint == load_model(folder, **options).adapter.fingerprint != other.adapter.fingerprint
    assert told.weights != other.adapter.weights
    wanted = other.prompt.logits
    alike = torch.corrcoef(torch.stack((prompt.flatten(), wanted.flatten())))[0, 1]
    assert alike >= 0.5, "other weights would say something else altogether"


def test_fp8_becomes_bfloat16_and_is_refused_under_fp32(plain: Path, tmp_path: Path) -> None:
    folder = in_fp8(plain, tmp_path / "fp8")
    require_served(folder, plain)
    require_one_line(folder, "FP8", "cannot be multiplied with float32", dtype=torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_compressed_tensors_are_served(plain: Path, tmp_path: Path, bits: int, dtype: torch.dtype | None) -> None:
    pytest.importorskip("compressed_tensors", reason="choreo-agents[quantized] is not installed")
    require_served(compressed(plain, tmp_path / "model", bits), plain, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchao_is_served(plain: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao", reason="choreo-agents[quantized] is not installed")
    require_served(on_torchao(plain, tmp_path / "model", dtype), plain)
