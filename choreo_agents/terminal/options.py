"""What the commands share: options, and errors as one red line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from choreo_agents.errors import ChoreoError, InvalidRequestError

MOST_AGENTS = 8

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name: see [b]choreo models check[/b].",
    ),
]
AgentsOption = Annotated[int, typer.Option("--agents", min=2, max=MOST_AGENTS, help="How many debate.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="How often each of them speaks.")]


@contextmanager
def errors_as_lines(console: Console, *, code: int = 1) -> Iterator[None]:
    """Print an expected error without a traceback and end with this exit code."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = "-".join(str(part) for part in first["loc"]).replace("_", "-")
        console.print("[red bold]error:[/] ", end="")
        console.print(f"--{name} {first['input']!r}: {first['msg']}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(code) from None
    except (ChoreoError, OSError, ValueError) as error:
        console.print("[red bold]error:[/] ", end="")
        console.print(str(error), markup=False, highlight=False)
        if isinstance(error, ChoreoError) and error.words:
            console.print(f"[dim]what is meant by {' and '.join(error.words)}: choreo words {' '.join(error.words)}[/]")
        raise typer.Exit(code) from None


def typed_command() -> str:
    """What was typed, and would do it again."""
    return shlex.join(["choreo", *sys.argv[1:]])


def require_writable(path: Path | None) -> None:
    """Raise an `OSError` now rather than after the measurement."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass


def numbers(text: str) -> list[int]:
    """Lengths that are given with commas between; raises `InvalidRequestError`."""
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InvalidRequestError(f"lengths are numbers from 1 on, with commas between, not {text!r}")
    return found


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """Shows how much of a long run is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        yield progress
