"""What the commands share: options, loading, and errors as one red line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from choreo_agents.errors import ChoreoError
from choreo_agents.models import LoadedModel, load_model

MOST_AGENTS = 8
SMALL_MODEL = 20_000_000
"""Parameters."""

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name: see [b]choreo models check[/b].",
    ),
]
AgentsOption = Annotated[int, typer.Option("--agents", min=2, max=MOST_AGENTS, help="How many debate.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="How often each of them speaks.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...")]


@contextmanager
def errors_as_lines(console: Console) -> Iterator[None]:
    """Print an expected error without a traceback and end with exit code 1."""
    try:
        yield
    except (ChoreoError, OSError, ValueError) as error:
        console.print("[red bold]error:[/] ", end="")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None


def require_writable(path: Path | None) -> None:
    """Raise an `OSError` now rather than after the measurement."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass


def load(console: Console, name: str, device: str) -> LoadedModel:
    """Load a model under a spinner. A very small one gets a single thread: waking more costs more than it gains."""
    with console.status(f"loading [b]{name}[/b] ..."):
        model = load_model(name, device=device)
    if model.adapter.parameters < SMALL_MODEL:
        torch.set_num_threads(1)
    return model
