"""Quantised checkpoints, made on the spot by the packages that read them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def compressed(plain: Path, folder: Path, bits: int) -> Path:
    """A checkpoint whose linear layers but the last are whole numbers of so many bits, by compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    how: dict[str, Any] = {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": 64}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **how)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=args)}
    config = QuantizationConfig(config_groups=groups, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale = module.weight_scale
            rows = module.weight.detach().float().view(len(scale), scale.shape[1], -1)
            scale.data.copy_(rows.abs().amax(-1) / (2 ** (bits - 1) - 1))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return _with_tokenizer(plain, folder)


def on_torchao(plain: Path, folder: Path, dtype: torch.dtype) -> Path:
    """A checkpoint whose linear layers have weights of eight bits, by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    how = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype, quantization_config=how)
    model.save_pretrained(folder)
    return _with_tokenizer(plain, folder)


def _with_tokenizer(plain: Path, folder: Path) -> Path:
    for path in (*plain.glob("tokenizer*"), *plain.glob("*.jinja")):
        shutil.copy(path, folder)
    return folder
