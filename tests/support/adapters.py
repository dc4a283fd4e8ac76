"""Random adapters as peft writes them, and plain peft as their oracle, in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import DynamicCache

from choreo_agents.models import LoadedModel
from choreo_agents.synthesis.mapper import CacheMapper
from support.exact import doubled, exactly, plain_model


def save_adapter(folder: Path, model_path: Path, *, seed: int = 1, **options: Any) -> Path:
    """An adapter for a checkpoint, of random weights in both halves, written by peft; `options` of its `LoraConfig`."""
    usual: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    torch.manual_seed(seed)
    model = get_peft_model(plain_model(model_path), LoraConfig(**(usual | options)))
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


class PeftOracle:
    """Logits of a checkpoint whose tokens an adapter serves or not, by plain forwards over a growing cache."""

    def __init__(self, model_path: Path, adapter: Path) -> None:
        self.model = doubled(PeftModel.from_pretrained(plain_model(model_path), str(adapter)).eval())

    @exactly()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocabulary], all of them served by the adapter."""
        return self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]

    @exactly()
    def mixed(self, spans: Sequence[tuple[Sequence[int], bool]]) -> Tensor:
        """The same of spans, one after the other, each with whether the adapter serves it."""
        cache, found = DynamicCache(), []
        for tokens, adapted in spans:
            ids = torch.tensor([list(tokens)])
            if adapted:
                found.append(self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0])
            else:
                with self.model.disable_adapter():
                    found.append(self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0])
        return torch.cat(found)


def random_mapper(model: LoadedModel, *, seed: int = 1, scale: float = 0.3, rank: int | None = None) -> CacheMapper:
    """A mapper that changes keys and values a good deal."""
    torch.manual_seed(seed)
    mapper = CacheMapper(model.adapter.geometry, model.adapter.kinds, rank)
    with torch.no_grad():
        for name, parameter in mapper.named_parameters():
            if not name.endswith("down"):
                parameter.normal_(std=scale)
    return mapper


def save_mapper(folder: Path, model: LoadedModel, **options: Any) -> Path:
    """The same in a folder, as a training run leaves it."""
    random_mapper(model, **options).save(folder, model.adapter.weights)
    return folder
