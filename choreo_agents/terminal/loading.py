"""Options with which commands load a model, and the loading itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich.console import Console
from rich.markup import escape

from choreo_agents.terminal.options import option_of, waiting

if TYPE_CHECKING:
    from choreo_agents.models import LoadedModel

_SMALL_MODEL = 20_000_000
"""Number of parameters below which a model runs on one thread."""


@dataclass(frozen=True)
class Loading:
    """Options of all commands that load a model."""

    device: str = Field(
        default="auto", description="Device of the model: cpu, cuda, cuda:1, ...; auto: the GPU if there is one."
    )
    dtype: str = Field(
        default="auto",
        description="Of weights and KV: bfloat16, float16, float32; auto: the checkpoint's own if the CPU has kernels.",
    )
    prepacked: bool = Field(default=True, description="Prepack weights for the CPU: faster, if memory allows it.")

    def model(self, name: Any) -> LoadedModel:
        """Load the model of that name."""
        from choreo_agents.models import load_model

        return load_model(name, device=self.device, dtype=self.dtype, prepacked=self.prepacked)


USUAL = Loading()


def takes_loading(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's parameter `loading` by the three options, with the defaults that it has in the parameter.

    Called from Python, the command still accepts `loading=`.
    """
    fields = Loading.__pydantic_fields__  # type: ignore[attr-defined]
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    usual: Loading = parameters.pop("loading").default

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        chosen = {name: kwargs.pop(name) for name in fields if name in kwargs}
        kwargs.setdefault("loading", Loading(**chosen))
        return command(*args, **kwargs)

    options = [option_of(name, field).replace(default=getattr(usual, name)) for name, field in fields.items()]
    seen_by_typer: Any = wrapper
    seen_by_typer.__signature__ = inspect.Signature([*parameters.values(), *options])
    return wrapper


def load(console: Console, name: str, loading: Loading) -> LoadedModel:
    """Load a model with a message on the console. A very small one gets one thread: waking more would cost time."""
    import torch

    with waiting(console, f"loading [b]{escape(name)}[/b] ..."):
        model = loading.model(name)
    if model.adapter.parameters < _SMALL_MODEL:
        torch.set_num_threads(1)
    return model
