"""Tiny random models of every family that the engine claims to serve exactly, and of some that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from support.shipped import shipped_tokenizer

Settings = Mapping[str, Any]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"sliding_window": 11, "query_pre_attn_scalar": 16}

FAMILIES: Mapping[str, Settings] = {
    "llama": {},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "llama-llama3": {"rope_parameters": _LLAMA3},
    "llama-yarn": {"rope_parameters": _YARN},
    "mistral": {"sliding_window": 12},
    "mixtral": {**_MOE, "sliding_window": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "qwen3": {},
    "qwen3_moe": _QWEN_MOE,
    "gemma": {},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    "phi": {},
    "phi3": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
    "cohere": {},
    "cohere2": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": {},
    "olmo3": {"sliding_window": 9},
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt_oss": _MOE | {"sliding_window": 9, "rope_parameters": _YARN},
    "granite": {"attention_multiplier": 0.25},
    "glm4": {},
    "exaone4": {"sliding_window": 9},
    "starcoder2": {},
    "nanochat": {},
    "qwen2_moe": {**_QWEN_MOE, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 4},
    # Its routers let every expert in: as they are by default, an expert within 2 % of the best counts and one just
    # beyond does not, and of thousands of tokens some stand within a rounding of that.
    "phimoe": {**_MOE, "sliding_window": 20, "router_jitter_noise": 2.0},
}
"""Settings by family; what stands behind a dash names a variant."""

REFUSED: Mapping[str, tuple[Settings, str]] = {
    "llama-dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "RoPE type 'dynamic': its frequencies change with the length of the input",
    ),
    "phi3-longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
        "RoPE type 'longrope': its frequencies change with the length of the input",
    ),
    "gpt2": ({}, "position embeddings are learned or added"),
    "opt": ({}, "position embeddings are learned or added"),
    "bloom": ({}, "ALiBi"),
    "mpt": ({}, "ALiBi"),
    "deepseek_v3": ({}, "latent"),
    "mamba": ({}, "recurrent layers"),
    "jamba": ({}, "recurrent layers"),
    "qwen3_next": ({}, "recurrent layers"),
    "llama4_text": ({}, "scaled by their absolute position"),
    "llama4_text-chunked": (
        {"attn_temperature_tuning": False, "attention_chunk_size": 20, "num_local_experts": 2},
        "is not causal within a window",
    ),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}, "but its mask one of 1024"),
    "ministral3": ({}, "scaled by their absolute position"),
    "gptj": ({"rotary_dim": 8}, "does not use"),
    "hunyuan_v1_dense": ({}, "by more than a rotation"),
    "gemma4_text": ({}, "different shapes"),
}
"""Settings and the reason by family."""


def tiny_config(
    family: str, settings: Settings, *, text: Settings | None = None, **towers: Settings
) -> PreTrainedConfig:
    """The configuration of a tiny model.

    Args:
        family: Its model type; what stands behind a dash is left out.
        settings: Of its configuration.
        text: Of the language model inside it, if it is one with `towers`.
    """
    base: dict[str, Any] = {
        "vocab_size": len(shipped_tokenizer()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    inside = {} if text is None else {"text_config": base | dict(text), **towers}
    return AutoConfig.for_model(family.partition("-")[0], **((base | dict(settings)) if text is None else inside))


def tiny_model(
    family: str, settings: Settings, *, seed: int = 0, text: Settings | None = None, **towers: Settings
) -> PreTrainedModel:
    """A model of random weights, its norms and attention sinks too, large enough for logits to differ.

    Args:
        family: As in `tiny_config`, as are `settings`, `text` and `towers`.
        seed: Of the weights.
    """
    return drawn(tiny_config(family, settings, text=text, **towers), seed)


def drawn(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model of a configuration, of random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
        elif "norm" in name and parameter.ndim == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def save_tiny(folder: Path, family: str, settings: Settings, *, seed: int = 0) -> Path:
    """Such a model on disk, with the embedded tokenizer."""
    tiny_model(family, settings, seed=seed).save_pretrained(folder)
    shipped_tokenizer().save_pretrained(folder)
    return folder
