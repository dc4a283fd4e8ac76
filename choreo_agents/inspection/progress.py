"""Progress bars for terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

_EVERY_S = 0.2
"""Seconds between two updates of a bar, at least: in a notebook each is a message to the browser."""


class ProgressBar:
    """A progress bar, to pass as `progress` or `on_progress`: it is called with the amount done.

    Args:
        title: Text beside the bar.
    """

    def __init__(self, title: str) -> None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        is_notebook = getattr(shell, "kernel", None) is not None
        # In a notebook the last state stays; where stderr is neither that nor a terminal, nothing is drawn (None).
        is_disabled = False if is_notebook else None
        self._bar = tqdm(desc=title, leave=is_notebook, disable=is_disabled, mininterval=_EVERY_S)

    def __call__(self, done: float, of: float | None = None) -> None:
        """Show that `done` of `of` is done; without `of` the last known total stays."""
        if of is not None:
            self._bar.total = of
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """End the display, whether or not the work is done."""
        self._bar.close()


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
    bar = ProgressBar(title)
    try:
        yield bar
    finally:
        bar.close()
