"""Progress bars for terminals and notebooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_EVERY_S = 0.2
"""Seconds between two updates of a notebook's bar, at least: each is a message to the browser."""


def drawn_on(console: Console) -> Progress:
    """Return progress bars with elapsed and remaining time, which disappear when they are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


class ProgressBar:
    """A progress bar, to pass as `progress` or `on_progress`: it is called with the amount done.

    Args:
        title: Text beside the bar.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.done: float = 0
        self.of: float | None = None
        """Total amount; None if it is unknown."""
        self._began_s = time.monotonic()

    def __call__(self, done: float, of: float | None = None) -> None:
        """Show that `done` of `of` is done; without `of` the last known total stays."""
        self.done, self.of = done, self.of if of is None else of
        self.show()

    def show(self) -> None:
        """Draw the bar as it is now."""

    def close(self) -> None:
        """End the display, whether or not the work is done."""

    def __str__(self) -> str:
        of = "" if self.of is None else f"/{self.of:g}"
        return f"{self.title}: {self.done:g}{of}, {self.seconds:.0f} s"

    __repr__ = __str__

    @property
    def seconds(self) -> float:
        """Seconds since the bar was made."""
        return time.monotonic() - self._began_s


class _TerminalBar(ProgressBar):
    """A bar on stderr, which is not drawn if that is no terminal."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._progress = drawn_on(Console(stderr=True))
        self._task = self._progress.add_task(title, total=None)
        self._progress.start()

    def show(self) -> None:
        self._progress.update(self._task, completed=self.done, total=self.of)

    def close(self) -> None:
        self._progress.stop()


class _NotebookBar(ProgressBar):
    """A bar in a notebook cell's output: it needs no widgets, and its last state stays visible."""

    def __init__(self, title: str, display: Any) -> None:
        super().__init__(title)
        self._shown = display(self, display_id=True)
        self._shown_s = time.monotonic()

    def show(self) -> None:
        if time.monotonic() - self._shown_s >= _EVERY_S or self.done == self.of:
            self._shown_s = time.monotonic()
            self._shown.update(self)

    def close(self) -> None:
        self._shown.update(self)

    def _repr_html_(self) -> str:
        of = "" if self.of is None else f' max="{self.of:g}" value="{self.done:g}"'
        return f'<label style="font-family:monospace"><progress{of}></progress> {escape(str(self))}</label>'


@contextmanager
def progress_bar(title: str) -> Iterator[ProgressBar]:
    """Show a progress bar during the block: in the notebook cell, else on the terminal.

    ```python
    with progress_bar("replaying") as bar:
        replay(app, "run.jsonl", progress=bar)
    ```

    Args:
        title: Text beside the bar.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        bar: ProgressBar = _TerminalBar(title)
    else:
        bar = _NotebookBar(title, import_module("IPython.display").display)
    try:
        yield bar
    finally:
        bar.close()
