"""Detects changes of a model since a lean pass was made: other modules, weights or numbers, or new hooks.

Writes that bypass torch's version counter, through `.data` or NumPy as when peft merges adapters, are not detected.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from choreo_agents.models.lora import is_adapting


class ModelSnapshot:
    """A snapshot of a model's modules, weights and hooks."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._weights: list[tuple[dict[str, Any], str, Tensor | None, Any]] = [
            (module._parameters, name, weight, state_of(weight))
            for module in modules
            for name, weight in module._parameters.items()
        ]
        self._numbers = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, float)
        ]
        """Scales, epsilons, multipliers."""
        self._places = [(parent._modules, name, child) for parent in modules for name, child in parent.named_children()]
        self._own = [vars(module) for module in modules]
        """Attributes of modules, where a replaced `forward` would be."""
        self._listeners = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    def is_current(self) -> bool:
        """Return whether the model is unchanged."""
        return (
            all(owner.get(name) is weight and state_of(weight) == state for owner, name, weight, state in self._weights)
            and all(owner.get(name) is module for owner, name, module in self._places)
            and all(owner.get(name) == value for owner, name, value in self._numbers)
            and not any("forward" in own for own in self._own)
            and all(is_adapting(hook) for hooks in self._listeners if hooks for hook in hooks.values())
        )


def state_of(weight: Tensor | None) -> tuple[int, int] | None:
    """Return the version and address of a weight, which change when torch writes or moves it; None for no weight."""
    return None if weight is None else (weight._version, weight.data_ptr())
