"""Trainable parameters: an adapter, a cache mapper, or both, for a model whose own weights stay frozen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from choreo_agents.errors import TrainingError
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE, exchanged, write_adapter
from choreo_agents.models.loader import LoadedModel
from choreo_agents.models.lora import LoraAdapter, LowRank, hook_layers, require_fit
from choreo_agents.synthesis.mapper import MAPPER_FILE, MERGING_FILE, CacheMapper, write_boundaries
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.settings import TuneSettings

TUNED = "tuned"
"""Name of the trained adapter in traces."""


class Tuned:
    """The parameters of a training run.

    Args:
        model: The model; its layers are hooked for the adapter.
        settings: Ranks and target layers.

    Raises:
        TrainingError: Both ranks are 0, or the model does not have the target layers.
    """

    def __init__(self, model: LoadedModel, settings: TuneSettings) -> None:
        self.model, self.settings, adapter = model, settings, model.adapter
        self.lora: LoraAdapter | None = None
        self.mapper: CacheMapper | None = None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            if settings.rank:
                parts = self._parts(target_modules(model, settings.targets))
                self.lora = LoraAdapter(TUNED, "", parts, settings.dropout)
                require_fit(adapter.model, self.lora)
                hook_layers(adapter.model, list(parts))
            if settings.mapper_rank is None or settings.mapper_rank:
                self.mapper = CacheMapper(adapter.geometry, adapter.kinds, settings.mapper_rank).to(adapter.device)
        if self.lora is None and self.mapper is None:
            raise TrainingError("there is nothing to train: set the rank of the adapter or of the mapper above 0")

    def forward(self, *, checkpointed: bool = False) -> TraceForward:
        """Return the forward pass of the model with these parameters, over traces that name the adapter `TUNED`."""
        adapters = {} if self.lora is None else {TUNED: self.lora}
        return TraceForward(self.model, adapters=adapters, mapper=self.mapper, checkpointed=checkpointed)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all trainable parameters in a stable order, the adapter's first."""
        for module, part in (self.lora.parts if self.lora is not None else {}).items():
            for side, tensor in (("down", part.down), ("up", part.up)):
                assert isinstance(tensor, nn.Parameter)
                yield f"{module}.{side}", tensor
        if self.mapper is not None:
            yield from ((f"mapper.{name}", parameter) for name, parameter in self.mapper.named_parameters())

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of all parameters by name."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Set all parameters from a state."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Write the files that `Engine.load_adapter` reads.

        Files of an adapter or a mapper that is not trained are removed: they would be served with the new ones. Files
        with the same content are left alone, because others may know their digests.

        Raises:
            OSError: They cannot be written. Then, and after a kill, the directory holds all old files, all new files,
                or none that can be loaded: never a new adapter beside an old mapper.
        """
        weights = self.model.adapter.weights
        with exchanged(folder, (WEIGHTS_FILE, CONFIG_FILE, MAPPER_FILE, MERGING_FILE)) as staging:
            if self.lora is not None:
                write_adapter(staging, self.lora.parts, weights, name=self.model.name, dropout=self.settings.dropout)
            if self.mapper is not None:
                self.mapper.save(staging, weights)
            if self.settings.boundaries:
                write_boundaries(staging)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    def _parts(self, names: list[str]) -> dict[str, LowRank]:
        rank, scale = self.settings.rank, self.settings.alpha / self.settings.rank
        device = self.model.adapter.device
        parts: dict[str, LowRank] = {}
        for name in names:
            module = self.model.adapter.model.get_submodule(name)
            assert isinstance(module, nn.Linear)
            down = torch.empty(rank, module.in_features)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            up = torch.zeros(module.out_features, rank)
            parts[name] = LowRank(nn.Parameter(down.to(device)), nn.Parameter(up.to(device)), scale)
        return parts


def target_modules(model: LoadedModel, targets: tuple[str, ...]) -> list[str]:
    """Return the names of the modules that an adapter adapts.

    These are the linear layers whose last name is a target; without targets, all but the output layer and experts.

    Raises:
        TrainingError: The model has no linear layer, or none with the name of a target.
    """
    output = model.adapter.model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.adapter.model.named_modules()
        if isinstance(module, nn.Linear) and module is not output and ".experts." not in name
    }
    names = {name.rpartition(".")[2] for name in linear}
    missing = [target for target in targets if target not in names]
    if missing or not linear:
        kind = f"called {' or '.join(missing)}" if missing else "that can be adapted"
        raise TrainingError(f"the model has no layer {kind}: it has {', '.join(sorted(names)) or 'no linear ones'}")
    return [name for name in linear if not targets or name.rpartition(".")[2] in targets]
