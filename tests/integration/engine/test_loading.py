"""Models load by path, hub name or as the embedded one, or are refused with the reason."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, REFUSED, save_tiny
from support.shipped import shipped_tokenizer
from support.tiny import save_tiny_llama
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, GptOssConfig
from typer.testing import CliRunner

from choreo_agents import Engine, Memory, Sampling
from choreo_agents.cli import app
from choreo_agents.errors import UnsupportedModelError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.support import ProbePrompt, probe_tokens, require_movable


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_the_embedded_model_is_small_and_loads_at_once() -> None:
    load_model("embedded")
    started = time.perf_counter()
    with Engine.load("embedded") as engine:
        assert time.perf_counter() - started < 10, "two seconds on an idle machine"
        assert engine.model.adapter.parameters <= 6_000_000
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 12_000_000


def test_the_embedded_model_asks_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **_: asked.append(where))
    monkeypatch.setattr(socket.socket, "connect", lambda _, where: asked.append(where))
    with Engine.load("embedded") as engine:
        engine.prefill("A text.")
    assert asked == []


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_cannot_be_served_exactly_is_refused_with_the_reason(tmp_path: Path, family: str) -> None:
    settings, reason = REFUSED[family]
    folder = save_tiny(tmp_path, family, settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        Engine.load(folder)
    result = CliRunner().invoke(app, ["models", "check", str(folder)], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and "error:" in result.output and reason in result.output
    assert "Traceback" not in result.output


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertLMHeadModel(config).save_pretrained(tmp_path)
    shipped_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        Engine.load(tmp_path)


def test_a_check_tells_how_the_layers_of_a_model_attend(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "cohere2", FAMILIES["cohere2"])
    result = CliRunner().invoke(app, ["models", "check", str(folder)], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "can be served exactly" in result.output
    assert "layers: 2 see 11 tokens, 2 see all" in result.output
    assert "moving cached keys changes logits by at most" in result.output and "KV 1.0 kB per token" in result.output


def test_a_missing_model_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="there is no folder"):
        Engine.load(tmp_path / "nowhere")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        Engine.load(folder)


def test_the_probe_notices_positions_that_are_no_pure_rotation(tmp_path: Path) -> None:
    """A model whose keys carry something of their absolute position passes every check of its configuration."""
    model = load_model(save_tiny_llama(tmp_path))
    tokens = probe_tokens(model.adapter.vocabulary_size)
    inner = model.adapter.model.model
    plain = inner.rotary_emb.forward

    def absolute(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = plain(x, position_ids)
        return cos * (1 + 0.01 * position_ids[..., None]), sin

    inner.rotary_emb.forward = absolute
    inner.set_attn_implementation("sdpa")
    with torch.inference_mode():
        expected = model.adapter.model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    inner.set_attn_implementation("choreo_segments")
    with pytest.raises(UnsupportedModelError, match="not a pure rotation"):
        require_movable(model.adapter, ProbePrompt(tokens, expected), model.backend("auto"))


@pytest.mark.parametrize(("seed", "spread"), [(1, 0.02), (0, 0.05)])
def test_tokens_that_rounding_sends_to_another_expert_are_no_reason_to_refuse_a_model(
    tmp_path: Path, seed: int, spread: float
) -> None:
    """In bf16 one bit decides between two experts that are nearly tied: with random weights, for one token in a few."""
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    experts = {"intermediate_size": 768, "num_local_experts": 4, "num_experts_per_tok": 2}
    tokenizer = shipped_tokenizer()
    config = GptOssConfig(
        **shape,
        **experts,
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        max_position_embeddings=1024,
        initializer_range=spread,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    probe = load_model(tmp_path, dtype=torch.bfloat16).probe
    assert probe.error <= probe.tolerance


def test_fingerprints_tell_weights_dtypes_and_shapes_apart(tmp_path: Path) -> None:
    first = save_tiny_llama(tmp_path / "first")
    fingerprints = {load_model(first).adapter.fingerprint}
    fingerprints.add(load_model(first, dtype=torch.bfloat16).adapter.fingerprint)
    fingerprints.add(load_model(save_tiny_llama(tmp_path / "other", seed=1)).adapter.fingerprint)
    fingerprints.add(load_model(save_tiny_llama(tmp_path / "rope", rope="llama3")).adapter.fingerprint)
    assert len(fingerprints) == 4
    copy = save_tiny_llama(tmp_path / "copy")
    assert load_model(copy).adapter.fingerprint in fingerprints
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert load_model(copy).adapter.fingerprint not in fingerprints


def test_the_embedded_model_recalls_from_notes(embedded: LoadedModel) -> None:
    with Engine.load(embedded, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        chat = engine.chat
        notes = "Notes: Ann has 3 red kites. Bob has 5 blue boats. Cleo has 2 green drums."
        right = 0
        for person, answer in (
            ("Ann", "Ann has 3 red kites."),
            ("Bob", "Bob has 5 blue boats."),
            ("Dan", "I do not know."),
        ):
            asked = (
                chat.root(None).text
                + chat.turn("system", notes).text
                + chat.turn("user", f"What does {person} have?").text
            )
            prompt = engine.prefill(asked)
            handle = engine.decode(chat.header("Alice"), [prompt], sampling=Sampling(max_tokens=16))
            right += answer in engine.text(handle)
        assert right == 3
