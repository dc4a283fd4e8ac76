"""Whether a model still is what a lean pass was made of: the same modules in the same places, with the same weights,
and nobody who listens to them.

What is written into a weight behind torch's back, through `.data` or NumPy as peft merges adapters, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from choreo_agents.models.lora import is_adapting


class MadeOf:
    """A model, as it is now.

    Args:
        model: Whose.
        read: The modules whose weights are read, and that are not asked any more.
    """

    def __init__(self, model: nn.Module, read: Iterable[nn.Module]) -> None:
        modules = {id(module): module for module in read}
        self._weights: list[tuple[dict[str, Any], str, Tensor | None, Any]] = [
            (module._parameters, name, weight, state_of(weight))
            for module in modules.values()
            for name, weight in module._parameters.items()
        ]
        self._numbers = [
            (vars(module), name, value)
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, float)
        ]
        """Scales, epsilons, multipliers."""
        self._places: list[tuple[dict[str, Any], str, nn.Module]] = []
        above: dict[int, nn.Module] = {}
        for parent in model.modules():
            for name, child in parent.named_children():
                if id(parent) in above or any(id(each) in modules for each in child.modules()):
                    self._places.append((parent._modules, name, child))
                    above[id(parent)] = parent
        heard = {**above, **modules}
        self._own = [vars(module) for module in heard.values()]
        """Where a forward pass that somebody has put on a module would stand."""
        self._listeners = [
            hooks for module in heard.values() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def is_there(self) -> bool:
        """Whether all of it still is."""
        return (
            all(held.get(name) is weight and state_of(weight) == seen for held, name, weight, seen in self._weights)
            and all(held.get(name) is module for held, name, module in self._places)
            and all(held.get(name) == value for held, name, value in self._numbers)
            and not any("forward" in own for own in self._own)
            and all(is_adapting(hook) for hooks in self._listeners if hooks for hook in hooks.values())
        )


def state_of(weight: Tensor | None) -> tuple[int, int] | None:
    """Changes with what torch writes into it, and with where it is; None of a bias that is not there."""
    return None if weight is None else (weight._version, weight.data_ptr())
