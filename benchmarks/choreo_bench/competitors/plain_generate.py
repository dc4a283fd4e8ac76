"""Hugging Face `generate` on a whole prompt: what a graph of strings does without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


class PlainGenerate:
    """A checkpoint whose every prompt is encoded from its first token on."""

    name = "HF generate"

    def __init__(self, path: Path, dtype: torch.dtype, device: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        self._model: PreTrainedModel = model.eval()

    @torch.inference_mode()
    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token after a prompt."""
        started = time.perf_counter()
        ids = torch.tensor([list(prompt)], device=self._model.device)
        mask = torch.ones_like(ids)
        output = self._model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, eos_token_id=None)
        int(output[0, -1])  # a GPU is done when this is known
        return time.perf_counter() - started
