"""Small random models, saved to disk and loaded the way a user's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from support.shipped import shipped_tokenizer

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def save_tiny_llama(
    folder: Path,
    *,
    rope: str = "default",
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **changes: Any,
) -> Path:
    """A Llama of random weights large enough for logits to differ; the embedded tokenizer, unless another is given."""
    torch.manual_seed(seed)
    tokenizer = shipped_tokenizer() if tokenizer is None else tokenizer
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_parameters": ROPES[rope],
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
