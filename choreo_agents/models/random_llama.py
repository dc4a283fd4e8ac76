"""Writes Llamas of random weights, for benchmarks: they cost what trained ones of their shape cost."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from choreo_agents.models.embedded import TOKENIZER_FILES, WEIGHTS
from choreo_agents.models.weights.dtypes import dtype_named


@dataclass(frozen=True)
class LlamaShape:
    """The sizes that decide a Llama's cost."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "smollm2-135m": LlamaShape(30, 576, 1536, 9, 3, 49152),
    "six-layers": LlamaShape(6, 896, 4864, 14, 2, 32000),
    "qwen3-0.6b": LlamaShape(28, 1024, 3072, 16, 8, 151936),
    "llama-8b": LlamaShape(32, 4096, 14336, 32, 8, 128256),
}
"""Shapes of known models, by name."""


def save_random_llama(
    shape: LlamaShape, folder: Path, *, seed: int = 0, positions: int = 8192, dtype: torch.dtype | str = torch.float32
) -> None:
    """Write a random Llama with the embedded model's tokenizer, extended by invented tokens.

    Args:
        shape: Its sizes.
        folder: Created if missing; must be empty.
        seed: Seed of the weights.
        positions: Context length in tokens.
        dtype: Dtype of its weights.

    Raises:
        FileExistsError: The folder holds files.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - takes seconds, not needed to list commands

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{str(folder)!r} is not empty: pass an empty folder")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=dtype_named(dtype) or torch.float32).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(WEIGHTS / name, folder / name)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {_make_word(token): token for token in range(len(vocabulary), shape.vocabulary)}
    path.write_text(json.dumps(tokenizer))


def _make_word(number: int) -> str:
    """Return a pronounceable word with a leading space, unique for each number, so that answers are readable."""
    letters = ""
    while number:
        number, syllable = divmod(number, 100)
        letters += "bcdfghjklmnprstvwxyz"[syllable // 5] + "aeiou"[syllable % 5]
    return f"\u0120{letters}x"
