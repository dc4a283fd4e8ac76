"""Says what a command waits for, from its first second on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_OTHERS = ("torchao", "torch.utils._pytree")
"""Loggers of what transformers imports if it is installed. They warn of libraries for other processors and of names
that will change, in whatever one does; a command says what concerns its user. An error of theirs is seen."""


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
    for logger in _OTHERS:
        logging.getLogger(logger).setLevel(logging.ERROR)
    if sys.modules.get("torch"):
        yield
    else:
        with waiting(console, "loading torch and LangGraph ..."):
            yield
