"""Random Llamas that are drawn on the device: writing and reading 16 GB would take most of the time."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from choreo_agents.models import LoadedModel, load_model
from choreo_agents.models.checkpoint import Checkpoint
from choreo_agents.models.embedded import TOKENIZER_FILES, WEIGHTS
from choreo_agents.models.fingerprint import WeightFiles
from choreo_agents.models.random_llama import LlamaShape

POSITIONS = 32768
SMALL = LlamaShape(3, 64, 128, 4, 2, 320)


def drawn_llama(shape: LlamaShape, device: torch.device, dtype: torch.dtype, backend: str) -> LoadedModel:
    """A Llama of a shape, checked at load with the backend that will serve as any model is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
        attn_implementation="eager",
    )

    def draw(*_: object, **__: object) -> LlamaForCausalLM:
        torch.manual_seed(0)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(usual)

    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(WEIGHTS / name, Path(folder) / name)
        with (
            patch.object(Checkpoint, "model", draw),
            patch.object(WeightFiles, "cached_fingerprint", lambda *_, **__: "drawn"),
        ):
            return load_model(folder, device=device, dtype=dtype, backend=backend)
