"""What loading a model costs without anything of ours: the least that any check of it needs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

FORWARDS, TOKENS = 3, 32


def load_plainly(path: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """`from_pretrained`, and three forward passes of 32 tokens."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
    with torch.inference_mode():
        for number in range(FORWARDS):
            model(input_ids=torch.arange(TOKENS)[None] + 3 + number, use_cache=False)
    return model
