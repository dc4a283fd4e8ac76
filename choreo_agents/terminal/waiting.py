"""Says what a command waits for, from its first second on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


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
