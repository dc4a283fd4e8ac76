"""A Llama's checkpoint in the file format of llama.cpp."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from choreo_bench.competitors.base import Absent

_OF_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, dtype: torch.dtype, target: Path) -> None:
    """Write a checkpoint's weights and shape, without a tokenizer.

    Args:
        path: A folder with the configuration and one file of weights.
        dtype: Of the matrices; what has one dimension stays float32, as llama.cpp wants it.
        target: The file that is written.

    Raises:
        Absent: The model is no plain Llama.
    """
    gguf: Any = importlib.import_module("gguf")
    config: Any = AutoConfig.from_pretrained(path)
    rope = config.rope_parameters
    if config.model_type != "llama" or rope["rope_type"] != "default":
        raise Absent("only plain Llamas are converted")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, loaded in load_file(path / "model.safetensors").items():
        renamed = _renamed(name)
        kind = renamed.split(".")[-2]
        weight = _interleaved(loaded, heads[kind]) if kind in heads else loaded
        if weight.ndim == 1 or dtype == torch.float32:
            writer.add_tensor(renamed, weight.float().numpy())
        else:
            data = weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(renamed, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` is `blk.3.attn_q.weight`."""
    if name in _OF_MODEL:
        return _OF_MODEL[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_OF_LAYER[part.removesuffix('.weight')]}.weight"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows whose rotated pairs lie half a head apart, [heads * head_dim, hidden], with each pair side by side."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)
