"""How commands load a model: the same three options everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch
import typer
from rich.console import Console
from rich.markup import escape

from choreo_agents.models import LoadedModel, load_model
from choreo_agents.terminal.waiting import waiting

SMALL_MODEL = 20_000_000
"""Parameters."""
DtypeName = Literal["auto", "bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that options have for them."""
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...; auto: the GPU if there is one.")
]
DtypeOption = Annotated[
    DtypeName, typer.Option("--dtype", help="Of weights and KV; auto: the checkpoint's own where the CPU has kernels.")
]
PrepackedOption = Annotated[
    bool,
    typer.Option("--prepacked/--no-prepacked", help="Lay weights out for the CPU: faster, where memory allows it."),
]
_OPTIONS = {"device": DeviceOption, "dtype": DtypeOption, "prepacked": PrepackedOption}


@dataclass(frozen=True)
class Loading:
    """What the options say."""

    device: str = "auto"
    dtype: DtypeName = "auto"
    prepacked: bool = True

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None: the checkpoint's own."""
        return DTYPES.get(self.dtype)

    def words(self) -> list[str]:
        """What one types to say the same."""
        said = [f"--dtype {self.dtype}"] if self.dtype != "auto" else []
        said += [f"--device {self.device}"] if self.device != "auto" else []
        return said + ([] if self.prepacked else ["--no-prepacked"])

    def model(self, name: Any) -> LoadedModel:
        """The model of that name."""
        return load_model(name, device=self.device, dtype=self.torch_dtype, prepacked=self.prepacked)


USUAL = Loading()
IN_BF16 = Loading(dtype="bf16")
"""What benchmarks of random weights load by default."""


def takes_loading(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the three options in the place of its parameter `loading`; called with a `loading`, it takes that.

    What that parameter is by default, the options are.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    usual: Loading = parameters["loading"].default

    @wraps(command)
    def taking(*args: Any, **given: Any) -> None:
        said = {name: given.pop(name) for name in _OPTIONS if name in given}
        given.setdefault("loading", Loading(**said))
        command(*args, **given)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(usual, name), annotation=option)
        for name, option in _OPTIONS.items()
    ]
    kept = [
        each.replace(annotation=hints.get(name, each.annotation))
        for name, each in parameters.items()
        if name != "loading"
    ]
    seen_by_typer: Any = taking
    seen_by_typer.__signature__ = inspect.Signature([*kept, *options])
    seen_by_typer.__annotations__ = {name: hint for name, hint in hints.items() if name != "loading"} | _OPTIONS
    return taking


def load(console: Console, name: str, loading: Loading) -> LoadedModel:
    """Load a model, and say so. A very small one gets a single thread: waking more costs more than it gains."""
    with waiting(console, f"loading [b]{escape(name)}[/b] ..."):
        model = loading.model(name)
    if model.adapter.parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    return model


def dtype_name(dtype: torch.dtype) -> str:
    """What options call a dtype."""
    return next(name for name, other in DTYPES.items() if other == dtype)


def device_name(device: torch.device) -> str:
    """What a device is called in a report."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


assert set(get_args(DtypeName)) == {"auto", *DTYPES}
