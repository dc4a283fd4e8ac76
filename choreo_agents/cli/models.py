"""`choreo models random`: models to measure with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console

from choreo_agents.terminal.loading import DTYPES
from choreo_agents.terminal.options import errors_as_lines
from choreo_agents.terminal.waiting import importing

ShapeName = Literal["smollm2-135m", "six-layers", "qwen3-0.6b", "llama-8b"]


def random(
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or empty folder.")],
    like: Annotated[
        ShapeName, typer.Option(metavar="MODEL", help=f"Whose shape it has: {', '.join(get_args(ShapeName))}.")
    ] = "smollm2-135m",
    seed: Annotated[int, typer.Option(max=2**32 - 1, help="Of the weights.")] = 0,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32",
) -> None:
    """Write a Llama of random weights: it says nothing sensible, and costs what a real one of its shape costs.

    [b]Example[/b]

      choreo models random /tmp/llama --like smollm2-135m
      choreo run debate --model /tmp/llama --repeats 3
    """
    console = Console(highlight=False)
    with importing(console):
        import torch

        from choreo_agents.models.random_llama import SHAPES, save_random_llama

    with errors_as_lines(console):
        with console.status("drawing weights ..."):
            save_random_llama(SHAPES[like], folder, seed=seed, dtype=getattr(torch, DTYPES[dtype]))
        console.print(f"wrote a random Llama of the shape of {like} to {folder}")
