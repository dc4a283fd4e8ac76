"""Progress bars for terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

_EVERY_S = 0.2
"""Seconds between two updates of a bar, at least: in a notebook each is a message to the browser."""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar during the block: in the notebook cell, else on the terminal.

    ```python
    with progress_bar("replaying") as bar:
        replay(app, "run.jsonl", progress=bar)
    ```

    Yields:
        A function of the amount done and, if it changes, the total: to pass as `progress` or `on_progress`.

    Args:
        title: Text beside the bar.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_notebook = getattr(shell, "kernel", None) is not None
    # In a notebook the last state stays; where stderr is neither that nor a terminal, nothing is drawn (None).
    is_disabled = False if is_notebook else None
    with tqdm(desc=title, leave=is_notebook, disable=is_disabled, mininterval=_EVERY_S) as bar:

        def show(done: float, of: float | None = None) -> None:
            if of is not None:
                bar.total = of
            bar.update(done - bar.n)

        yield show
