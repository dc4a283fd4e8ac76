"""A Hugging Face model as the runtime sees it."""

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
from choreo_agents.models.hook import attending, route
from choreo_agents.models.lean import LeanForward
from choreo_agents.models.lora import Adapted, LoraAdapter, adapting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_USUAL_CONTEXT = 2048
"""Tokens, where a configuration does not say."""


class ModelAdapter:
    """One forward pass over a packed row of tokens whose attention the engine decides.

    Args:
        model: A supported model (see `choreo_agents.models.support`), in eval mode on its device.
        attention: How it attends.
        files: From which it was read, as they were before.
        end_token: The tokenizer's, if it has one.
    """

    lean: LeanForward | FusedForward | None = None
    """Serves in the place of the modelling code where it can."""

    def __init__(
        self, model: PreTrainedModel, attention: ModelAttention, files: WeightFiles, end_token: int | None = None
    ) -> None:
        config = model.config.get_text_config()
        self.model = model
        self._chooses_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.device: torch.device = model.device
        self._files = files
        self.fingerprint = files.remembered(model)
        self.max_positions: int = max_positions(config)
        self.vocabulary_size: int = config.vocab_size
        self.heads: int = config.num_attention_heads
        self.parameters: int = model.num_parameters()
        self.geometry, self.kinds = attention
        self.end_tokens = _end_tokens(model, end_token)
        route(model)

    @cached_property
    def weights(self) -> str:
        """16 hex digits that tell the model's weights from others', be they loaded in fp32 or in bfloat16."""
        return self._files.remembered(self.model, rounded=True)

    def read_adapter(self, folder: Path) -> LoraAdapter:
        """Read an adapter from a folder in peft's layout; raises `AdapterError` unless it can serve this model."""
        return read_adapter(folder, self.model, self.weights)

    @torch.inference_mode()
    def logits(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        attention: Attention,
        wanted: Sequence[int],
        adapted: Sequence[Adapted] = (),
    ) -> Tensor:
        """Encode a step's tokens and return the logits after some of them.

        Args:
            tokens: Token ids of all rows, packed.
            positions: Each token's own position.
            attention: Where keys and values go, and what each token attends to.
            wanted: Indices into `tokens`.
            adapted: Which adapters serve which tokens.

        Returns:
            [len(wanted), vocabulary].
        """
        told = {"tokens": tokens, "positions": positions, "wanted": wanted}
        sent = SentTables({name: numpy.array(part, dtype=numpy.int64) for name, part in told.items()}, self.device)
        return self.traced_logits(sent["tokens"], sent["positions"], attention, sent["wanted"], adapted)

    def traced_logits(
        self, tokens: Tensor, positions: Tensor, attention: Attention, wanted: Tensor, adapted: Sequence[Adapted] = ()
    ) -> Tensor:
        """`logits` of tensors on the model's device, through which gradients flow if the attention lets them."""
        lean = self.lean
        if lean is not None and not lean.made_of.is_there():
            self.lean = lean = None  # for good: what it was made of need not be kept beside what there is now
        if lean is not None and not adapted and not torch.is_grad_enabled() and lean.serves(attention):
            return lean.logits(tokens, positions, attention, wanted)
        with attending(attention), adapting(adapted):
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                **({"logits_to_keep": wanted} if self._chooses_logits else {}),
            )
        logits: Tensor = out.logits[0]
        return logits if self._chooses_logits else logits[wanted]


def _end_tokens(model: PreTrainedModel, end_token: int | None) -> tuple[int, ...]:
    """All that generation stops at: of its own settings and of the tokenizer; where neither says, of the model's."""
    generation = model.generation_config
    said = [*listed(None if generation is None else generation.eos_token_id), *listed(end_token)]
    return tuple(dict.fromkeys(said or listed(model.config.get_text_config().eos_token_id)))


def listed(ends: Any) -> list[int]:
    """The tokens that a setting names: one, several, or none."""
    return [] if ends is None else [int(each) for each in ends] if isinstance(ends, list | tuple) else [int(ends)]


def max_positions(config: PreTrainedConfig) -> int:
    """The context length in tokens."""
    return int(getattr(config, "max_position_embeddings", None) or _USUAL_CONTEXT)
