"""Models without weights: tokenizer and chat format here, weights in the processes of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from choreo_agents.attention.step import Attention
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.adapter_files import read_adapter
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.checkpoint import Checkpoint
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.hub_path import hub_path
from choreo_agents.models.loader import EMBEDDED, LoadedModel
from choreo_agents.models.lora import Adapted, LoraAdapter
from choreo_agents.models.safe_tokenization import safe_tokenizer
from choreo_agents.models.support import MovedLogits, ProbePrompt
from choreo_agents.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FACTS = (
    "fingerprint",
    "weights",
    "max_positions",
    "vocabulary_size",
    "heads",
    "parameters",
    "geometry",
    "kinds",
    "end_tokens",
)
"""The attributes of a `ModelAdapter` that do not need its weights."""


@dataclass(frozen=True)
class ServedModel:
    """The description of a model that a process has loaded: plain values that can be sent."""

    facts: Mapping[str, Any]
    probe: MovedLogits
    sampling_defaults: Sampling

    @classmethod
    def of(cls, model: LoadedModel) -> ServedModel:
        """Describe a loaded model; `weights` of a large one takes a while the first time."""
        facts = {name: getattr(model.adapter, name) for name in _FACTS}
        return cls(facts, model.probe, model.sampling_defaults)

    def load(self, name: str | Path, *, chat: Mapping[str, Any] | None = None) -> LoadedModel:
        """Load a model's configuration and tokenizer, and take the rest from this description.

        Args:
            name: As for `load_model`: its small files are read here, too.
            chat: As for `load_model`.

        Raises:
            ModelNotFoundError, UnsupportedModelError, OSError: As `load_model`.
        """
        source = WEIGHTS if str(name) == EMBEDDED else hub_path(name)
        checkpoint = Checkpoint.read(str(name), source)
        tokenizer = checkpoint.tokenizer()
        return LoadedModel(
            str(name),
            WeightlessAdapter(checkpoint, self.facts),
            tokenizer,
            chat_format(tokenizer, chat),
            safe_tokenizer(tokenizer),
            self.probe,
            ProbePrompt([0, 0], torch.zeros(2, 1)),  # never used: the adapter refuses to compute
            sampling_defaults=self.sampling_defaults,
            fallback_reason="it is computed by remote engines",
        )


class WeightlessAdapter(ModelAdapter):
    """A model adapter without weights, which refuses to compute.

    Args:
        checkpoint: The model's files.
        facts: Its attributes, from the process that has its weights.
    """

    def __init__(self, checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
        self._checkpoint = checkpoint
        self.device = torch.device("cpu")
        """Device of the few tensors that are kept here."""
        # Without `ModelAdapter.__init__`, which needs weights; this also fills the cached property `weights`.
        vars(self).update(facts)

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device: layers and shapes."""
        return self._checkpoint.skeleton()

    def read_adapter(self, folder: Path) -> LoraAdapter:
        """Read an adapter; only its names and shapes are kept."""
        return read_adapter(folder, self.skeleton, self.weights)

    def traced_logits(
        self, tokens: Tensor, positions: Tensor, attention: Attention, indices: Tensor, adapted: Sequence[Adapted] = ()
    ) -> Tensor:
        """Raise `InvalidRequestError`."""
        name = self._checkpoint.name
        raise InvalidRequestError(
            f"the model's weights are on remote engines: it cannot compute here. Load them with Engine.load({name!r})"
        )
