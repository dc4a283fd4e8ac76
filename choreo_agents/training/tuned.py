"""What is trained: an adapter, a cache mapper, or both, beside a model that stays as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from choreo_agents.errors import TrainingError
from choreo_agents.models.adapter_files import CONFIG_FILE, WEIGHTS_FILE, exchanged, write_adapter
from choreo_agents.models.loader import LoadedModel
from choreo_agents.models.lora import LoraAdapter, LowRank, hook_layers, require_fit
from choreo_agents.synthesis.mapper import MAPPER_FILE, MERGING_FILE, CacheMapper, MergingConfig, write_merging
from choreo_agents.training.settings import TuneSettings

TUNED = "tuned"
"""What traces call the adapter that is trained."""


class Tuned:
    """The parameters of a training run.

    Args:
        model: That they are for; its layers are made ready for the adapter.
        settings: Which, and of which rank.

    Raises:
        TrainingError: Nothing is to be trained, or the model has no layer of those that are named.
    """

    def __init__(self, model: LoadedModel, settings: TuneSettings) -> None:
        self.model = model
        self.settings = settings
        adapter = model.adapter
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
            raise TrainingError("nothing is to be trained: give the adapter or the mapper a rank above 0")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that learns, the adapter's first, in a stable order."""
        for module, part in (self.lora.parts if self.lora is not None else {}).items():
            for side, tensor in (("down", part.down), ("up", part.up)):
                assert isinstance(tensor, nn.Parameter)
                yield f"{module}.{side}", tensor
        if self.mapper is not None:
            yield from ((f"mapper.{name}", parameter) for name, parameter in self.mapper.named_parameters())

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all values, by name."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Take all values from a state."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(state[name])

    def save(self, folder: Path) -> None:
        """Write what `Engine.load_adapter` reads. An adapter or a mapper that is not trained goes from the folder:
        it would be served with this one. Files that say the same are left as they are, whose digests others know.

        Raises:
            OSError: It cannot be written. Then, and after a kill, the folder holds what was there, all of the new, or
                what nobody loads: never a new adapter beside an old mapper.
        """
        weights = self.model.adapter.weights
        with exchanged(folder, (WEIGHTS_FILE, CONFIG_FILE, MAPPER_FILE, MERGING_FILE)) as made:
            if self.lora is not None:
                write_adapter(made, self.lora.parts, weights, name=self.model.name, dropout=self.settings.dropout)
            if self.mapper is not None:
                self.mapper.save(made, weights)
            if self.settings.boundaries:
                write_merging(made, MergingConfig(boundaries=True))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    def _parts(self, names: list[str]) -> dict[str, LowRank]:
        rank, scale = self.settings.rank, self.settings.alpha / self.settings.rank
        device = self.model.adapter.device
        parts: dict[str, LowRank] = {}
        for name in names:
            outputs, inputs = _shape(self.model.adapter.model.get_submodule(name))
            down = torch.empty(rank, inputs)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5))
            up = torch.zeros(outputs, rank)
            parts[name] = LowRank(nn.Parameter(down.to(device)), nn.Parameter(up.to(device)), scale)
        return parts


def target_modules(model: LoadedModel, targets: tuple[str, ...]) -> list[str]:
    """The modules that an adapter adapts: those whose last name is among the targets; without any, all linear layers
    but the output's and experts'.

    Raises:
        TrainingError: There is none, or none that has one of these names.
    """
    output = model.adapter.model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.adapter.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not output and ".experts." not in name
    }
    known = {name.rpartition(".")[2] for name in linear}
    missing = [target for target in targets if target not in known]
    if missing or not linear:
        wanted = f"called {' or '.join(missing)}" if missing else "that can be adapted"
        raise TrainingError(f"the model has no layer {wanted}: it has {', '.join(sorted(known)) or 'no linear ones'}")
    return [name for name in linear if not targets or name.rpartition(".")[2] in targets]


def _shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    assert isinstance(module, Conv1D)
    inputs, outputs = module.weight.shape
    return int(outputs), int(inputs)
