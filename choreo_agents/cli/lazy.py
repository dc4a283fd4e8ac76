"""Commands that are found by name: a module is imported when its command is called, not when commands are listed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from choreo_agents.terminal.waiting import waiting

HELP_OPTION = "--help"
OTHERS = ("torchao", "torch.utils._pytree")
"""Loggers of what transformers imports if it is installed. They warn of libraries for other processors and of names
that will change, in whatever one does; a command says what concerns its user. An error of theirs is seen."""


def found(place: str) -> Any:
    """What `module:name` is, the module imported."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Command:
    """Where a command is, and what a list says of it."""

    place: str
    """`module:function`, of the command itself; with `workflow`, of what makes it."""
    help: str
    """The first paragraph of the command's own help."""
    workflow: str | None = None
    """The workflow that it is made for: one of `CASES`."""

    @property
    def module(self) -> str:
        return self.place.partition(":")[0]

    def load(self) -> Callable[..., None]:
        """The function, its module imported."""
        named = found(self.place)
        made: Callable[..., None] = named if self.workflow is None else named(self.workflow)
        return made


@dataclass(frozen=True)
class Group:
    """Commands under one name."""

    help: str
    members: Mapping[str, Command | Group]
    """By name, in the order in which they are listed."""
    installed: str | None = None
    """The group of entry points under which other distributions have more of them, ..."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """... and what to install for some, by their names."""

    def added(self) -> dict[str, Command]:
        """What is installed, looked for anew. A command says the summary of its distribution where it is listed."""
        found = {} if self.installed is None else {each.name: each for each in entry_points(group=self.installed)}
        return {name: Command(each.value, _summary(each)) for name, each in found.items() if name not in self.members}


def _summary(entry: EntryPoint) -> str:
    return "" if entry.dist is None or "Summary" not in entry.dist.metadata else entry.dist.metadata["Summary"]


class LazyGroup(TyperGroup):
    """Lists commands by the table alone, and imports the one that is called.

    Commands may be written with hyphens or with underscores. What other distributions have is looked for when commands
    are listed, or one is called that the table has not.
    """

    table: ClassVar[Group]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.members = dict(self.table.members)
        listed = _listed(self.members)
        self.commands = {name: listed.get(name) or self.commands[name] for name in self.members}

    def list_commands(self, ctx: Any) -> list[str]:
        self._add()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if found := self._here(ctx, cmd_name):
            return found
        self._add()
        if (found := self._here(ctx, cmd_name)) is None and cmd_name in self.table.elsewhere:
            ctx.fail(f"'{cmd_name}' is not installed: pip install {self.table.elsewhere[cmd_name]}")
        return found

    def _here(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, name) or super().get_command(ctx, name.replace("_", "-"))

    def _add(self) -> None:
        added = self.table.added()
        self.members.update(added)
        self.commands.update(_listed(added))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        listed = "" if found is None else found.name or ""
        member = self.members.get(listed)
        if not isinstance(member, Command):
            return name, found, rest
        for logger in OTHERS:
            logging.getLogger(logger).setLevel(logging.ERROR)
        with nullcontext() if ctx.resilient_parsing else _announced(member, rest):
            return name, click_command(listed, member), rest


def _listed(members: Mapping[str, Command | Group]) -> dict[str, TyperCommand]:
    """What stands for commands in lists and completions, until they are called."""
    return {
        name: TyperCommand(name, help=member.help, rich_markup_mode="rich")
        for name, member in members.items()
        if isinstance(member, Command)
    }


def click_command(name: str, command: Command) -> Any:
    """A command with its options, its module imported."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(command.load())
    return typer.main.get_command(app)


def typer_app(group: Group) -> typer.Typer:
    """A group, and those in it, whose commands are imported when they are called."""
    listing = type("Listing", (LazyGroup,), {"table": group})
    app = typer.Typer(
        cls=listing,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,
        help=group.help,
    )
    app.callback()(_nothing)
    for name, member in group.members.items():
        if isinstance(member, Group):
            app.add_typer(typer_app(member), name=name)
    return app


def _nothing() -> None:
    """What a group does before its commands. Without it, one that has no group in it would be none itself."""


def _announced(command: Command, arguments: list[str]) -> Any:
    """Says that a module is being imported, unless it was before. Help is not preceded by a line that stays."""
    console = Console(stderr=True, highlight=False)
    if command.module in sys.modules or (HELP_OPTION in arguments and not console.is_terminal):
        return nullcontext()
    return waiting(console, "loading torch and LangGraph ...")
