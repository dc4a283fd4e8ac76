"""`choreo models`: what can be run, and models to measure with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.attention.rope import PureRotation
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.sampling import Sampling
from choreo_agents.terminal.loading import USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import errors_as_lines

ShapeName = Literal["smollm2-135m", "six-layers", "qwen3-0.6b", "llama-8b"]
assert set(get_args(ShapeName)) == set(SHAPES)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random(
    folder: Annotated[Path, typer.Argument(help="Where to write it: a new or empty folder.")],
    like: Annotated[ShapeName, typer.Option(help="Whose shape it has.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(max=2**62, help="Of the weights.")] = 0,
    dtype: Annotated[Literal["fp32", "bf16"], typer.Option(help="Of the weights.")] = "fp32",
) -> None:
    """Write a Llama of random weights: it says nothing sensible, and costs what a real one of its shape costs.

    [b]Example[/b]

      choreo models random /tmp/llama --like smollm2-135m
      choreo run debate --model /tmp/llama --repeats 3
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        with console.status("drawing weights ..."):
            save_random_llama(SHAPES[like], folder, seed=seed, dtype=_DTYPES[dtype])
        console.print(f"wrote a random Llama of the shape of {like} to {folder}")


@takes_loading
def check(
    model: Annotated[str, typer.Argument(help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name.")],
    loading: Loading = USUAL,
) -> None:
    """Say whether a model can be served exactly, and if not, why.

    Its layers are measured, and its logits compared with the plain model's after moving cached keys.

    [b]Example[/b]

      choreo models check embedded
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        loaded = load(console, model, loading)
    adapter, probe = loaded.adapter, loaded.probe
    console.print(f"[green]{escape(model)} can be served exactly[/]")
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("layers", "positions", "window", "soft cap"):
        table.add_column(column)
    for kind in dict.fromkeys(adapter.kinds):
        layers = [layer for layer, other in enumerate(adapter.kinds) if other == kind]
        window = "all" if kind.window is None else f"{kind.window} tokens"
        table.add_row(_ranges(layers), _positions(kind.rotation), window, f"{kind.softcap or 'none'}")
    console.print(table)
    geometry = adapter.geometry
    console.print(
        f"{adapter.parameters / 1e6:,.2f} M parameters in {str(geometry.dtype).removeprefix('torch.')}, context of "
        f"{adapter.max_positions:,} tokens, {geometry.bytes_per_token / 1024:,.1f} KiB of keys and values a token"
    )
    console.print(f"calls that do not say how to sample {_sampling_words(loaded.sampling_defaults)}")
    console.print(
        f"moving cached keys changes logits by {probe.error:.2g} at most; {probe.tolerance:.2g} would be rounding"
    )


def _sampling_words(defaults: Sampling) -> str:
    said = [f"{name} {value:g}" for name, value in defaults if name in defaults.model_fields_set]
    if not said:
        return "take the likeliest token"
    return f"have the checkpoint's {', '.join(said).replace('_', ' ')}"


def _positions(rotation: PureRotation | None) -> str:
    if rotation is None:
        return "none"
    pairs = "halves" if rotation.pairing == "halves" else "neighbours"
    return f"rotary, {rotation.dimensions} dimensions, {pairs} paired"


def _ranges(numbers: list[int]) -> str:
    """`0-3, 5`, or every other number as `0, 2, 4`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
