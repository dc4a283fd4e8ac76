"""Lazily imported groups of commands, to which other distributions add through entry points.

An entry point of the group `choreo.commands` adds a function, which is a command, or a `typer.Typer`, which is a group:
`name = module:object`, and `group.name` for a member of a group that `group()` has made. Built-in commands cannot be
replaced. Listing commands imports their modules, so slow imports belong into a command's body.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

ENTRY_POINTS = "choreo.commands"
ELSEWHERE = dict.fromkeys(("eval", "bench", "train", "pml.memory"), "choreo-bench") | {"serve": "choreo-server"}
"""Distributions to install, by the commands that they add."""
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
"""Loggers of packages that transformers imports. Whatever a command does, they warn of libraries for other processors
and of deprecated names: only their errors are shown."""


class CommandGroup(TyperGroup):
    """A group whose commands are imported when it is listed or one of them is called.

    Names match with hyphens and with underscores. Commands of other distributions are listed after the built-in ones.
    """

    def members(self) -> Mapping[str, typer.Typer | Callable[..., Any]]:
        """Import the built-in commands and groups, and return them by name, in the order in which they are listed."""
        return {}

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_own(ctx)
        self._add_installed(ctx)
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for add in (self._add_own, self._add_installed):
            add(ctx)
            for name in (cmd_name, cmd_name.replace("_", "-")):
                if name in self.commands:
                    return self.commands[name]
        words = (*_path(ctx), cmd_name)
        if package := ELSEWHERE.get(".".join(words)):
            ctx.fail(f"'{' '.join(words)}' is not installed: pip install {package}")
        return None

    def invoke(self, ctx: Any) -> Any:
        for logger in _NOISY_LOGGERS:
            logging.getLogger(logger).setLevel(logging.ERROR)
        return super().invoke(ctx)

    def _add_own(self, ctx: Any) -> None:
        if not self.commands:
            self.commands.update({name: _as_command(name, member) for name, member in self.members().items()})

    def _add_installed(self, ctx: Any) -> None:
        for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
            *group, name = entry.name.split(".")
            if group == _path(ctx) and name not in self.commands:
                self.commands[name] = _load_entry(entry, name)


def group(help_text: str, members: Callable[[], Mapping[str, typer.Typer | Callable[..., Any]]]) -> typer.Typer:
    """Return a group of commands that other distributions can add to; `members` is called when they are needed."""
    return typer.Typer(
        cls=type("Group", (CommandGroup,), {"members": lambda self: members()}),
        help=help_text,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,
    )


def _path(ctx: Any) -> list[str]:
    """Return the names of a group and its parents, without `choreo`."""
    return [] if ctx.parent is None else [*_path(ctx.parent), ctx.command.name]


def _as_command(name: str, member: typer.Typer | Callable[..., Any], **settings: Any) -> Any:
    """Return a function as a click command, or a `typer.Typer` as a group; typer does so for members of an app only."""
    holder = typer.Typer(rich_markup_mode="rich")
    if isinstance(member, typer.Typer):
        holder.add_typer(member, name=name)
    else:
        holder.command(name, **settings)(member)
    return typer.main.get_group(holder).commands[name]


def _load_entry(entry: EntryPoint, name: str) -> Any:
    """Load an entry point's command; if that fails, return one whose help and error say why."""
    try:
        return _as_command(name, entry.load())
    except Exception as error:
        reason = f"{entry.value} cannot be loaded: {type(error).__name__}: {error}"

    def refuse(ctx: typer.Context) -> None:
        ctx.fail(reason)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return _as_command(name, refuse, help=escape(reason), context_settings=settings)
