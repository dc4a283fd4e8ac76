"""Wraps a Hugging Face model for the runtime: one forward pass over packed tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from choreo_agents.attention.packing import SentTables
from choreo_agents.attention.step import Attention
from choreo_agents.models.adapter_files import read_adapter
from choreo_agents.models.discovery import ModelAttention
from choreo_agents.models.fingerprint import WeightFiles
from choreo_agents.models.fused import FusedForward
from choreo_agents.models.hook import pass_context, route
from choreo_agents.models.lean import LeanForward
from choreo_agents.models.lora import Adapted, LoraAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_USUAL_CONTEXT = 2048
"""Context length, in tokens, of a configuration that does not give one."""


class ModelAdapter:
    """A Hugging Face model whose forward pass takes packed tokens and the engine's attention.

    Args:
        model: A supported model (see `choreo_agents.models.support`), in eval mode on its device.
        attention: KV shapes, and the attention kind of each layer.
        files: The files of its weights, as they were before they were read.
        end_token: The tokenizer's end token, if it has one.
    """

    lean: LeanForward | FusedForward | None = None
    """Forward pass that replaces the modelling code where it can; None: there is none."""

    def __init__(
        self, model: PreTrainedModel, attention: ModelAttention, files: WeightFiles, end_token: int | None = None
    ) -> None:
        config = model.config.get_text_config()
        self.model = model
        self._chooses_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.device: torch.device = model.device
        self._files = files
        self.fingerprint = files.cached_fingerprint(model)
        self.max_positions: int = max_positions(config)
        self.vocabulary_size: int = config.vocab_size
        self.heads: int = config.num_attention_heads
        self.parameters: int = model.num_parameters()
        self.geometry, self.kinds = attention
        self.end_tokens = tuple(
            end_tokens(getattr(model.generation_config, "eos_token_id", None), end_token, config.eos_token_id)
        )
        route(model)

    @cached_property
    def weights(self) -> str:
        """Fingerprint of the weights in 16 hex digits, the same whether they are loaded in fp32 or bfloat16."""
        return self._files.cached_fingerprint(self.model, rounded=True)

    def read_adapter(self, folder: Path) -> LoraAdapter:
        """Read an adapter from a folder in peft's layout; raise `AdapterError` unless it can serve this model."""
        return read_adapter(folder, self.model, self.weights)

    @torch.inference_mode()
    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        attention: Attention,
        indices: Sequence[int],
        adapted: Sequence[Adapted] = (),
    ) -> Tensor:
        """Encode a step's tokens and return the logits after some of them.

        Args:
            tokens: Token ids of all rows, packed.
            positions: Position of each token in its row.
            attention: Where keys and values go, and what each token attends to.
            indices: Indices into `tokens`, of those whose logits are returned.
            adapted: Which adapters serve which tokens.

        Returns:
            [len(indices), vocabulary].
        """
        inputs = {"tokens": tokens, "positions": positions, "wanted": indices}
        sent = SentTables({name: numpy.array(part, dtype=numpy.int64) for name, part in inputs.items()}, self.device)
        return self.traced_logits(sent["tokens"], sent["positions"], attention, sent["wanted"], adapted)

    def traced_logits(
        self, tokens: Tensor, positions: Tensor, attention: Attention, indices: Tensor, adapted: Sequence[Adapted] = ()
    ) -> Tensor:
        """Return `logits` for tensors on the model's device; gradients flow if the attention lets them."""
        lean = self.lean
        if lean is not None and not lean.made_of.is_current():
            self.lean = lean = None  # for good: free the weights that it was made of
        if lean is not None and not adapted and not torch.is_grad_enabled() and lean.serves(attention):
            return lean.logits(tokens, positions, attention, indices)
        with pass_context(attention, adapted):
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                **({"logits_to_keep": indices} if self._chooses_logits else {}),
            )
        logits: Tensor = out.logits[0]
        return logits if self._chooses_logits else logits[indices]


def end_tokens(generation: Any, tokenizer: Any, config: Any) -> dict[int, list[str]]:
    """Return the end tokens of the generation settings and the tokenizer, or if there are none, the configuration's.

    Each argument is one token id, several, or none; each token comes with the names of those that have it.
    """
    sources = {"generation_config.json": _as_token_ids(generation), "tokenizer": _as_token_ids(tokenizer)}
    if not any(sources.values()):
        sources = {"config.json": _as_token_ids(config)}
    tokens = dict.fromkeys(token for tokens in sources.values() for token in tokens)
    return {token: [name for name, tokens in sources.items() if token in tokens] for token in tokens}


def _as_token_ids(ends: Any) -> list[int]:
    """Return a setting of one token id, several, or none as a list."""
    return [] if ends is None else [int(token) for token in ends] if isinstance(ends, list | tuple) else [int(ends)]


def max_positions(config: PreTrainedConfig) -> int:
    """Return the context length in tokens."""
    return int(getattr(config, "max_position_embeddings", None) or _USUAL_CONTEXT)
