"""`choreo words`: what the words of our messages and pages mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from choreo_agents.errors import InvalidRequestError
from choreo_agents.terminal.options import errors_as_lines

_PLACES = (Path(__file__).with_name("glossary.md"), Path(__file__).parents[2] / "docs/explanation/glossary.md")
"""Where the page of the documentation lies: beside this file in a wheel, else in the repository."""
_ROW = re.compile(r"\| (\*\*.+?) \| (.+) \|")
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def glossary() -> dict[tuple[str, ...], str]:
    """What each word means, as text; words that are told together have one meaning."""
    page = next(place for place in _PLACES if place.is_file()).read_text()
    return {
        tuple(re.findall(r"\*\*(.+?)\*\*", row[1])): _LINK.sub(r"\1", re.sub(r"[*`]", "", row[2]))
        for row in map(_ROW.fullmatch, page.splitlines())
        if row is not None
    }


def words(
    sought: Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", show_default=False)] = None,
) -> None:
    """Say what words mean that our error messages and pages use: those given, or all.

    [b]Examples[/b]

      choreo words
      choreo words view offset
    """
    console = Console(highlight=False)
    with errors_as_lines(console):
        known, asked = glossary(), [word.lower() for word in sought or ()]
        if unknown := [word for word in asked if not any(_is_of(word, names) for names in known)]:
            raise InvalidRequestError(f"{unknown[0]!r} is no word of ours: choreo words lists them")
        found = Table(box=box.SIMPLE, show_header=False)
        found.add_column(style="b", no_wrap=True)
        found.add_column()
        for names, meaning in known.items():
            if not asked or any(_is_of(word, names) for word in asked):
                found.add_row(",\n".join(map(escape, names)), escape(meaning))
        console.print(found)


def _is_of(word: str, names: tuple[str, ...]) -> bool:
    """Whether it is one of these, or one of several words of which one is made."""
    return any(word == name or word in name.split() for name in names)
