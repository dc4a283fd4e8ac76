"""What the commands share: options, and errors as one red line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name: see [b]choreo models check[/b].",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")]


@contextmanager
def errors_as_lines(console: Console, *, code: int = 1) -> Iterator[None]:
    """Print an expected error without a traceback and end with this exit code."""
    try:
        yield
    except Exception as error:
        # Imported here: with LangChain's errors that takes a good part of the time in which help is shown.
        from pydantic import ValidationError

        from choreo_agents.errors import ChoreoError

        if not isinstance(error, ChoreoError | OSError | ValueError):
            raise
        said = str(error)
        # Of settings, which are options by the same names.
        cause = error.__cause__ if str(error).startswith(("Sampling(", "TuneSettings(")) else error
        if isinstance(cause, ValidationError):
            first = cause.errors()[0]
            name = "-".join(str(part) for part in first["loc"]).replace("_", "-")
            said = f"--{name} {first['input']!r}: {first['msg']}"
        console.print("[red bold]error:[/] ", end="")
        console.print(said, markup=False, highlight=False, soft_wrap=isinstance(cause, ValidationError))
        raise typer.Exit(code) from None


def named_values(option: str, said: Sequence[str] | None) -> dict[str, str]:
    """Read what is typed as NAME=VALUE; raises `ValueError`."""
    found = {}
    for text in said or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{option} takes NAME=VALUE, not {text!r}")
        found[name] = value
    return found


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """Shows how much of a long run is done."""
    from rich import progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(*columns, *times, console=console, transient=True) as shown:
        yield shown
