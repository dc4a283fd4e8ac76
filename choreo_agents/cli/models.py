"""`choreo models`: what can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console

from choreo_agents.cli.options import errors_as_lines
from choreo_agents.models.random_llama import SHAPES, save_random_llama

models_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Make models to measure with.")
ShapeName = Literal["smollm2-135m", "six-layers"]
assert set(get_args(ShapeName)) == set(SHAPES)


@models_app.callback()
def _models() -> None:
    """Make models to measure with."""


@models_app.command()
def random(
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or empty folder.")],
    like: Annotated[ShapeName, typer.Option(help="Whose shape it has.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a Llama of random weights: it says nothing sensible, and costs what a real one of its shape costs.

    [b]Example[/b]

      choreo models random /tmp/llama --like smollm2-135m
      choreo run debate --model /tmp/llama --repeats 3
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        with console.status("drawing weights ..."):
            save_random_llama(SHAPES[like], folder, seed=seed)
        console.print(f"wrote a random Llama of the shape of {like} to {folder}")
