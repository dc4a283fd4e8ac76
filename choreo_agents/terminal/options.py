"""Options, tables, progress displays, and errors as one red line, which all commands share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name: see [b]choreo models check[/b].",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print only JSON to stdout: one object; of run --inputs, one per line.")
]


def option_of(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return a pydantic field as a parameter of a command: an option with its limits, description and default."""
    least = next((limit.ge for limit in field.metadata if isinstance(limit, Ge)), None)
    most = next((limit.le for limit in field.metadata if isinstance(limit, Le)), None)
    limits: Any = {"min": least, "max": most} if least is not None or most is not None else {}
    help_text = field.description or ""
    if get_origin(field.annotation) is Literal:
        limits["metavar"] = name.upper()  # typer would show all choices here, broken at 80 columns
        help_text = f"{help_text.removesuffix('.')}: {', '.join(get_args(field.annotation))}."
    kind, option = inspect.Parameter.KEYWORD_ONLY, typer.Option(help=help_text, **limits)
    return inspect.Parameter(name, kind, default=field.default, annotation=Annotated[field.annotation, option])


@contextmanager
def command_console(*, as_json: bool = False, error_code: int = 1) -> Iterator[Console]:
    """Yield a command's console, stderr with `as_json`, once torch and LangGraph are imported; print expected errors.

    A command imports the package's other modules in this block, so that --help does not wait for them.
    """
    console = Console(stderr=as_json, highlight=False)
    try:
        with nullcontext() if sys.modules.get("torch") else waiting(console, "loading torch and LangGraph ..."):
            import_module("choreo_agents.graph")
        yield console
    except Exception as error:
        # Imported here because it imports LangChain, which would slow down --help.
        from pydantic import ValidationError

        from choreo_agents.errors import ChoreoError

        if not isinstance(error, ChoreoError | OSError | ValueError):
            raise
        message = str(error)
        # The fields of these settings are options of the same names, so the message names the option.
        cause = error.__cause__ if str(error).startswith(("Sampling(", "TuneSettings(")) else error
        if isinstance(cause, ValidationError):
            first = cause.errors()[0]
            name = "-".join(str(part) for part in first["loc"]).replace("_", "-")
            message = f"--{name} {first['input']!r}: {first['msg']}"
        console.print("[red bold]error:[/] ", end="")
        console.print(message, markup=False, highlight=False, soft_wrap=isinstance(cause, ValidationError))
        raise typer.Exit(error_code) from None


def named_values(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Parse NAME=VALUE arguments into a dict; raises `ValueError`."""
    values = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{option} must be NAME=VALUE, not {text!r}")
        values[name] = value
    return values


@contextmanager
def bar(console: Console, title: str = "", total: float | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar; the yielded function takes the arguments of `rich.progress.Progress.update`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
        yield partial(shown.update, shown.add_task(title, total=total))


@contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """Show that something takes time: a spinner on a terminal, else a line on stderr, to keep stdout free for results.

    Args:
        console: Shows the spinner if it is a terminal.
        text: What takes time, with rich's markup.
    """
    shown = console if console.is_terminal else Console(stderr=True, highlight=False)
    if shown.is_terminal:
        with shown.status(text):
            yield
    else:
        shown.print(text, soft_wrap=True)
        yield


def titled(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> Table:
    """Return a table whose columns in `right` are right-aligned; cells are rich's markup, the title is not."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
