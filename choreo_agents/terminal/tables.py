"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich import box
from rich.table import Table
from rich.text import Text


def titled(title: str, columns: Iterable[str], right: Collection[str] = ()) -> Table:
    """A table without rows, some of whose columns are set to the right; its title is words, and no markup."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
