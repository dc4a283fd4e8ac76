"""What the commands share: options, tables, errors as one red line, and what is seen of what takes its time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
def bar(console: Console, what: str = "", total: float | None = None) -> Iterator[Callable[..., None]]:
    """Shows how much of a long run is done: as it is told, in arguments of `rich.progress.Progress.update`."""
    from choreo_agents.inspection.progress import drawn_on

    with drawn_on(console) as shown:
        yield partial(shown.update, shown.add_task(what, total=total))


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Show what takes its time: a spinner on a terminal, else a line on stderr, which no pipe of results reads.

    Args:
        console: Shows it if it is a terminal.
        what: With rich's markup.
    """
    shown = console if console.is_terminal else Console(stderr=True, highlight=False)
    if shown.is_terminal:
        with shown.status(what):
            yield
    else:
        shown.print(what, soft_wrap=True)
        yield


@contextmanager
def importing(console: Console) -> Iterator[None]:
    """Show that torch and LangGraph are imported, which takes seconds: commands do so in their body, help does not."""
    if sys.modules.get("torch"):
        yield
    else:
        with waiting(console, "loading torch and LangGraph ..."):
            yield


def titled(title: str, columns: Iterable[str], right: Collection[str] = ()) -> Table:
    """A table without rows, some of whose columns are set to the right; its title is words, and no markup."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
