"""Models without weights: tokenizer and chat format here, weights in the processes of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.step import Attention
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.geometry import KVGeometry
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


@dataclass(frozen=True)
class _AdapterFacts:
    """The attributes of a `ModelAdapter` that do not need its weights."""

    fingerprint: str
    weights: str
    max_positions: int
    vocabulary_size: int
    heads: int
    parameters: int
    geometry: KVGeometry
    kinds: tuple[AttentionKind, ...]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True)
class ServedModel(_AdapterFacts):
    """The description of a model that a process has loaded: plain values that can be sent."""

    name: str
    """The name that it was loaded by."""
    device: str
    moved: tuple[float, float]
    """Fields of its `MovedLogits`: error and tolerance."""
    prepacked: int
    sampling_defaults: Sampling

    @classmethod
    def of(cls, model: LoadedModel) -> ServedModel:
        """Describe a loaded model; `weights` of a large one takes a while the first time."""
        adapter = model.adapter
        facts: dict[str, Any] = {field.name: getattr(adapter, field.name) for field in fields(_AdapterFacts)}
        facts |= {"prepacked": model.prepacked, "sampling_defaults": model.sampling_defaults}
        moved = (model.probe.error, model.probe.tolerance)
        return cls(name=model.name, device=str(adapter.device), moved=moved, **facts)

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
            WeightlessAdapter(checkpoint, self),
            tokenizer,
            chat_format(tokenizer, chat),
            safe_tokenizer(tokenizer),
            MovedLogits(*self.moved),
            ProbePrompt([0, 0], torch.zeros(2, 1)),  # never used: the adapter refuses to compute
            self.prepacked,
            sampling_defaults=self.sampling_defaults,
            fallback_reason="it is computed by remote engines",
        )


class WeightlessAdapter(ModelAdapter):
    """A model adapter without weights, which refuses to compute.

    Args:
        checkpoint: The model's files.
        served: Description from the process that has its weights.
    """

    def __init__(self, checkpoint: Checkpoint, served: ServedModel) -> None:
        self._checkpoint = checkpoint
        self.device = torch.device("cpu")
        """Device of the few tensors that are kept here."""
        # Without `ModelAdapter.__init__`, which needs weights; this also fills the cached property `weights`.
        vars(self).update((field.name, getattr(served, field.name)) for field in fields(_AdapterFacts))

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
