"""Low-rank adapters that serve tokens, not models: one forward pass may hold rows of several adapters and of none."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from choreo_agents.errors import AdapterError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to one layer's output: `scale * up(down(x))` (LoRA, Hu et al. 2021)."""

    down: Tensor
    """[rank, inputs]."""
    up: Tensor
    """[outputs, rank]."""
    scale: float

    def delta(self, x: Tensor, dropout: float = 0.0) -> Tensor:
        """[..., inputs] to [..., outputs]; `dropout` is the share of inputs that are left out, while training."""
        seen = functional.dropout(x, dropout) if dropout else x
        # While they are trained the parts may be wider than the model.
        down, up = self.down.to(x.dtype), self.up.to(x.dtype)
        return functional.linear(functional.linear(seen, down), up) * self.scale


@dataclass(eq=False)
class LoraAdapter:
    """The low-rank parts of an adapter, by the module they belong to."""

    name: str
    fingerprint: str
    """16 hex digits that tell its weights from others'."""
    parts: Mapping[str, LowRank]
    dropout: float = 0.0
    """Only while it is trained."""

    @property
    def parameters(self) -> int:
        return sum(part.down.numel() + part.up.numel() for part in self.parts.values())


Adapted = tuple[LoraAdapter, Tensor | None]
"""An adapter and the indices of the tokens, in a packed row, that it serves; None: all of them."""

_current = threading.local()
_hooking = threading.Lock()
"""Two threads may load adapters at once; a layer that was hooked twice would add everything twice."""


@contextmanager
def adapting(spans: Sequence[Adapted]) -> Iterator[None]:
    """Let adapters serve their tokens in the forward passes of this thread. A token is served by one at most."""
    before = current_spans()
    _current.spans = spans
    try:
        yield
    finally:
        _current.spans = before


def current_spans() -> Sequence[Adapted]:
    """What `adapting` said last in this thread: to say it again where a pass is computed once more."""
    spans: Sequence[Adapted] = getattr(_current, "spans", ())
    return spans


def require_fit(model: PreTrainedModel, adapter: LoraAdapter) -> None:
    """Raise `AdapterError` unless every part of an adapter fits a layer of the model that sees tokens in a row."""
    what, last = f"adapter {adapter.name!r} adapts", model.get_output_embeddings()
    for name, part in adapter.parts.items():
        try:
            module: nn.Module | None = model.get_submodule(name)
        except AttributeError:
            module = None
        # Experts see the tokens that are sent to them, the last layer those that are sampled after.
        if "experts" in name.split(".") or (module is not None and module is last):
            raise AdapterError(f"{what} {name!r}: no layer can be adapted that does not see all tokens in a row")
        if module is None:
            raise AdapterError(f"{what} {name!r}, which the model does not have: it is for another model")
        shape = _shape(module)
        if shape is None or part.up.ndim != 2 or part.down.ndim != 2:
            raise AdapterError(f"{what} {name!r}: only linear layers can be, by two matrices")
        own = (part.up.shape[0], part.down.shape[1])
        if own != shape or part.up.shape[1] != part.down.shape[0]:
            raise AdapterError(
                f"adapter {adapter.name!r} is for another model: {name!r} maps {shape[1]} to {shape[0]} values here, "
                f"{own[1]} to {own[0]} there"
            )


def hook_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Make layers ask `adapting` what to add to their outputs; hooked ones stay so."""
    with _hooking:
        hooked: set[str] = getattr(model, "_choreo_adapted_layers", set())
        for name in names:
            if name not in hooked:
                model.get_submodule(name).register_forward_hook(_hook(name))
        object.__setattr__(model, "_choreo_adapted_layers", hooked | set(names))


def _hook(name: str) -> Any:
    def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for adapter, rows in current_spans():
            part = adapter.parts.get(name)
            if part is not None:
                output = _added(output, args[0], part, rows, adapter.dropout)
        return output

    add.adapts = True  # type: ignore[attr-defined]
    return add


def is_adapting(hook: Any) -> bool:
    """Whether a hook of a layer is ours: it adds nothing where `adapting` says nothing."""
    return getattr(hook, "adapts", False)


def _added(output: Tensor, x: Tensor, part: LowRank, rows: Tensor | None, dropout: float) -> Tensor:
    if rows is None:
        return output + part.delta(x, dropout)
    flat = output.reshape(-1, output.shape[-1])
    delta = part.delta(x.reshape(-1, x.shape[-1])[rows], dropout)
    added = flat.index_add(0, rows, delta) if torch.is_grad_enabled() else flat.index_add_(0, rows, delta)
    return added.view(output.shape)


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer; None if it is none."""
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - loading the model has imported it

    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return int(outputs), int(inputs)
    return None
