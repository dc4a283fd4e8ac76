"""What the commands share: options, how a model is loaded, tables, errors as one red line, and what is seen of what takes
its time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from choreo_agents.models import LoadedModel

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


_SMALL_MODEL = 20_000_000
"""Parameters."""
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1, ...; auto: the GPU if there is one.")
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
    typer.Option("--prepacked/--no-prepacked", help="Lay weights out for the CPU: faster, where memory allows it."),
]
_OPTIONS = {"device": DeviceOption, "dtype": DtypeOption, "prepacked": PrepackedOption}


@dataclass(frozen=True)
class Loading:
    """What the options say."""

    device: str = "auto"
    dtype: str = "auto"
    prepacked: bool = True

    def model(self, name: Any) -> LoadedModel:
        """The model of that name."""
        from choreo_agents.models import load_model

        return load_model(name, device=self.device, dtype=self.dtype, prepacked=self.prepacked)


USUAL = Loading()


def takes_loading(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the three options in the place of its parameter `loading`; called with a `loading`, it takes that.

    What that parameter is by default, the options are.
    """
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    usual: Loading = parameters.pop("loading").default

    @wraps(command)
    def taking(*args: Any, **given: Any) -> None:
        said = {name: given.pop(name) for name in _OPTIONS if name in given}
        given.setdefault("loading", Loading(**said))
        command(*args, **given)

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(usual, name), annotation=option)
        for name, option in _OPTIONS.items()
    ]
    seen_by_typer: Any = taking
    seen_by_typer.__signature__ = inspect.Signature([*parameters.values(), *options])
    return taking


def load(console: Console, name: str, loading: Loading) -> LoadedModel:
    """Load a model, and say so. A very small one gets a single thread: waking more costs more than it gains."""
    with importing(console):
        import torch

    with waiting(console, f"loading [b]{escape(name)}[/b] ..."):
        model = loading.model(name)
    if model.adapter.parameters < _SMALL_MODEL:
        torch.set_num_threads(1)
    return model
