"""A model without its weights: its words, places and names, for who has other processes compute with it."""

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
from choreo_agents.models.chat import chat_format
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
    """What is told of a `ModelAdapter`, by its own names."""

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
    """What whoever has loaded a model tells of it: plain values, for any wire."""

    name: str
    """As it was loaded there."""
    device: str
    moved: tuple[float, float]
    """What moving cached keys did to its logits, and what rounding explains of that."""
    prepacked: int
    sampling_defaults: Sampling


def served_model(model: LoadedModel) -> ServedModel:
    """What is to be told of a model; `weights` of a large one takes a while the first time."""
    adapter = model.adapter
    told: dict[str, Any] = {each.name: getattr(adapter, each.name) for each in fields(_AdapterFacts)}
    told |= {"prepacked": model.prepacked, "sampling_defaults": model.sampling_defaults}
    moved = (model.probe.error, model.probe.tolerance)
    return ServedModel(name=model.name, device=str(adapter.device), moved=moved, **told)


def load_weightless(name: str | Path, served: ServedModel, *, chat: Mapping[str, Any] | None = None) -> LoadedModel:
    """A model's configuration and tokenizer, with what is told of the rest.

    Args:
        name: As for `load_model`: its small files are read here, too.
        served: By whom it is computed with.
        chat: As for `load_model`.

    Raises:
        ModelNotFoundError, UnsupportedModelError, OSError: As `load_model`.
    """
    source = WEIGHTS if str(name) == EMBEDDED else hub_path(name)
    checkpoint = Checkpoint.read(str(name), source)
    tokenizer = checkpoint.tokenizer()
    adapter = WeightlessAdapter(checkpoint, served)
    prompt = ProbePrompt([0, 0], torch.zeros(2, 1))  # who would compute with it is refused by the adapter
    moved = MovedLogits(*served.moved)
    turns, spelling = chat_format(tokenizer, chat), safe_tokenizer(tokenizer)
    return LoadedModel(
        str(name),
        adapter,
        tokenizer,
        turns,
        spelling,
        moved,
        prompt,
        served.prepacked,
        sampling_defaults=served.sampling_defaults,
        modelling="it is computed by engines elsewhere",
    )


class WeightlessAdapter(ModelAdapter):
    """Knows all about a model but how to compute with it.

    Args:
        checkpoint: Its files.
        served: What is told of it.
    """

    def __init__(self, checkpoint: Checkpoint, served: ServedModel) -> None:
        self._checkpoint = checkpoint
        self.device = torch.device("cpu")
        """Of what little is kept here."""
        vars(self).update((each.name, getattr(served, each.name)) for each in fields(_AdapterFacts))

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model's layers and their shapes."""
        return self._checkpoint.skeleton()

    def read_adapter(self, folder: Path) -> LoraAdapter:
        """See `ModelAdapter`; of the adapter, too, only names and shapes are kept."""
        return read_adapter(folder, self.skeleton, self.weights)

    def traced_logits(
        self, tokens: Tensor, positions: Tensor, attention: Attention, wanted: Tensor, adapted: Sequence[Adapted] = ()
    ) -> Tensor:
        """Raises `InvalidRequestError`."""
        name = self._checkpoint.name
        raise InvalidRequestError(
            f"the model's weights are elsewhere: nothing can be computed with it here. Engine.load({name!r}) loads them"
        )
