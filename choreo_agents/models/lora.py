"""Applies LoRA adapters per token: one forward pass may hold rows of several adapters and of none."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from choreo_agents.errors import AdapterError
from choreo_agents.models.hook import current_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class LowRank:
    """The part of an adapter for one layer, which adds `scale * up(down(x))` to its output (LoRA, Hu et al. 2021)."""

    down: Tensor
    """[rank, inputs]."""
    up: Tensor
    """[outputs, rank]."""
    scale: float

    def delta(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        """Map [..., inputs] to [..., outputs]; `dropout` is the share of inputs that are dropped, in training."""
        inputs = functional.dropout(x, dropout) if dropout else x
        # In training, the parts may have a wider dtype than the model.
        down, up = self.down.to(x.dtype), self.up.to(x.dtype)
        return functional.linear(functional.linear(inputs, down), up) * self.scale


@dataclass(eq=False)
class LoraAdapter:
    """The low-rank parts of an adapter, by the module they belong to."""

    name: str
    fingerprint: str
    """Hash of its weights in 16 hex digits."""
    parts: Mapping[str, LowRank]
    dropout: float = 0.0
    """Share of inputs that are dropped; only in training."""

    @property
    def parameters(self) -> int:
        return sum(part.down.numel() + part.up.numel() for part in self.parts.values())


Adapted = tuple[LoraAdapter, Tensor | None]
"""An adapter and the indices of its tokens in a packed row; None: all of them."""

_hooking = threading.Lock()
"""Guards the hooks: two threads may load adapters at once, and a layer hooked twice would add each part twice."""


def require_fit(model: PreTrainedModel, adapter: LoraAdapter) -> None:
    """Raise `AdapterError` unless every part fits a linear layer of the model that takes all tokens in order."""
    subject, last = f"adapter {adapter.name!r} adapts", model.get_output_embeddings()
    for name, part in adapter.parts.items():
        try:
            module: nn.Module | None = model.get_submodule(name)
        except AttributeError:
            module = None
        # Experts see only tokens routed to them, and the output layer only those that are sampled from: indices differ.
        if "experts" in name.split(".") or (module is not None and module is last):
            raise AdapterError(f"{subject} {name!r}: experts and the output layer are not supported")
        if module is None:
            raise AdapterError(f"{subject} {name!r}, which the model does not have: it is for another model")
        if not isinstance(module, nn.Linear) or part.up.ndim != 2 or part.down.ndim != 2:
            raise AdapterError(f"{subject} {name!r}: only linear layers are supported, with two matrices")
        shape, own = (module.out_features, module.in_features), (part.up.shape[0], part.down.shape[1])
        if own != shape or part.up.shape[1] != part.down.shape[0]:
            raise AdapterError(
                f"adapter {adapter.name!r} is for another model: {name!r} maps {shape[1]} to {shape[0]} values in the "
                f"model, but {own[1]} to {own[0]} in the adapter"
            )


def hook_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Hook layers, once each, so that the parts given to `pass_context` are added to their outputs."""
    with _hooking:
        for name in names:
            module = model.get_submodule(name)
            if all(getattr(hook, "adapts", None) != name for hook in module._forward_hooks.values()):
                module.register_forward_hook(_hook(name))


def _hook(name: str) -> Any:
    def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for adapter, rows in current_adapters():
            part = adapter.parts.get(name)
            if part is not None:
                output = _add_delta(output, args[0], part, rows, adapter.dropout)
        return output

    add.adapts = name  # type: ignore[attr-defined]
    return add


def is_adapting(hook: Any) -> bool:
    """Return whether a layer's forward hook is ours, which adds nothing without adapters."""
    return hasattr(hook, "adapts")


def _add_delta(output: Tensor, x: Tensor, part: LowRank, rows: Tensor | None, dropout: float) -> Tensor:
    if rows is None:
        return output + part.delta(x, dropout)
    flat = output.reshape(-1, output.shape[-1])
    delta = part.delta(x.reshape(-1, x.shape[-1])[rows], dropout)
    added = flat.index_add(0, rows, delta) if torch.is_grad_enabled() else flat.index_add_(0, rows, delta)
    return added.view(output.shape)
