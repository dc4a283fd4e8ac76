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
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from choreo_agents.terminal.waiting import waiting

ENTRY_POINTS = "choreo.commands"
"""The group of entry points by which a distribution adds a `Command` or a `Group`: `name = module:OBJECT`, and
`group.name` for a member of a group. What is in the table cannot be replaced."""
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
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """What to install for members that other distributions add: listed after ours, in this order, before all others."""


def load_member(entry: EntryPoint) -> Command | Group | str:
    """Load what an entry point adds; if it cannot be loaded, say why."""
    try:
        member = entry.load()
        if isinstance(member, Command | Group):
            return member
        raise TypeError("it is neither a Command nor a Group")
    except Exception as error:
        return f"{entry.value} cannot be loaded: {type(error).__name__}: {error}"


class LazyGroup(TyperGroup):
    """Lists commands by the table alone, and imports the one that is called.

    Commands may be written with hyphens or with underscores. What other distributions add is looked for when commands
    are listed, or one is called that the table has not.
    """

    table: ClassVar[Group]
    path: ClassVar[tuple[str, ...]]
    """The words that call it, behind `choreo`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.members: dict[str, Command | Group | str] = {}
        """By name; one that cannot be loaded is the reason."""
        for name, member in self.table.members.items():
            self._add(name, member)

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_installed()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if found := self._here(ctx, cmd_name):
            return found
        self._add_installed()
        if (found := self._here(ctx, cmd_name)) is None and cmd_name in self.table.elsewhere:
            words = " ".join((*self.path, cmd_name))
            ctx.fail(f"'{words}' is not installed: pip install {self.table.elsewhere[cmd_name]}")
        return found

    def _here(self, ctx: Any, name: str) -> Any:
        return super().get_command(ctx, name) or super().get_command(ctx, name.replace("_", "-"))

    def _add_installed(self) -> None:
        """Look anew for what other distributions add to this group."""
        prefix = "".join(f"{name}." for name in self.path)
        installed = entry_points(group=ENTRY_POINTS)
        entries = {each.name.removeprefix(prefix): each for each in installed if each.name.startswith(prefix)}
        for name in (*self.table.elsewhere, *sorted(entries)):
            if name in entries and "." not in name and name not in self.members:
                self._add(name, load_member(entries[name]))

    def _add(self, name: str, member: Command | Group | str) -> None:
        """Add what stands for a member in lists and completions; for a command, until it is called."""
        self.members[name] = member
        if isinstance(member, Group):
            self.commands[name] = typer.main.get_group(typer_app(member, *self.path, name))
        else:
            said = escape(member) if isinstance(member, str) else member.help
            self.commands[name] = TyperCommand(name, help=said, rich_markup_mode="rich")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        listed = "" if found is None else found.name or ""
        member = self.members.get(listed)
        if isinstance(member, str) and not ctx.resilient_parsing:
            ctx.fail(member)
        if not isinstance(member, Command):
            return name, found, rest
        for logger in OTHERS:
            logging.getLogger(logger).setLevel(logging.ERROR)
        with nullcontext() if ctx.resilient_parsing else _announced(member, rest):
            return name, click_command(listed, member), rest


def click_command(name: str, command: Command) -> Any:
    """A command with its options, its module imported."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name)(command.load())
    return typer.main.get_command(app)


def typer_app(group: Group, *path: str) -> typer.Typer:
    """Make an app of a group that these words call; its commands are imported when they are called."""
    return typer.Typer(
        name=path[-1] if path else None,
        cls=type("Listing", (LazyGroup,), {"table": group, "path": path}),
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,
        help=group.help,
        callback=lambda: None,  # without one, an app that has no commands of its own is no group
    )


def _announced(command: Command, arguments: list[str]) -> Any:
    """Says that a module is being imported, unless it was before. Help is not preceded by a line that stays."""
    console = Console(stderr=True, highlight=False)
    if command.module in sys.modules or (HELP_OPTION in arguments and not console.is_terminal):
        return nullcontext()
    return waiting(console, "loading torch and LangGraph ...")
