"""Options with which commands load a model, and the loading itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.terminal.options import waiting

if TYPE_CHECKING:
    from choreo_agents.models import LoadedModel

_SMALL_MODEL = 20_000_000
"""Number of parameters below which a model runs on one thread."""
DeviceOption = Annotated[
    str, typer.Option("--device", help="Device of the model: cpu, cuda, cuda:1, ...; auto: the GPU if there is one.")
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Of weights and KV: bfloat16, float16, float32; auto: the checkpoint's own where the CPU has kernels.",
    ),
]
PrepackedOption = Annotated[
    bool,
    typer.Option("--prepacked/--no-prepacked", help="Prepack weights for the CPU: faster, if memory allows it."),
]
_OPTIONS = {"device": DeviceOption, "dtype": DtypeOption, "prepacked": PrepackedOption}


@dataclass(frozen=True)
class Loading:
    """Values of `--device`, `--dtype` and `--prepacked`."""

    device: str = "auto"
    dtype: str = "auto"
    prepacked: bool = True

    def model(self, name: Any) -> LoadedModel:
        """Load the model of that name."""
        from choreo_agents.models import load_model

        return load_model(name, device=self.device, dtype=self.dtype, prepacked=self.prepacked)


USUAL = Loading()


def takes_loading(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `loading` by the three options, with the defaults that it has in the parameter.

    Called from Python, the command still accepts `loading=`.
    """
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    usual: Loading = parameters.pop("loading").default

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        chosen = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        kwargs.setdefault("loading", Loading(**chosen))
        command(*args, **kwargs)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(usual, name), annotation=option)
        for name, option in _OPTIONS.items()
    ]
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
