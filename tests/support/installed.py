"""Distributions as pip would install them: by their metadata `choreo` finds the commands that they add."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from choreo_agents.cli import app
from choreo_agents.terminal import commands
from choreo_agents.terminal.commands import ENTRY_POINTS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SERVER = ROOT / "integrations" / "server"


def commands_in(folder: Path) -> dict[str, str]:
    """Read which commands the pyproject.toml in a folder declares: by name, where they are."""
    declared: dict[str, str] = _project(folder)["entry-points"][ENTRY_POINTS]
    return declared


def own_commands() -> dict[tuple[str, ...], Any]:
    """Find the commands of the product, by the words that call them, whatever is installed besides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "entry_points", lambda **_: ())
        return all_commands()


def all_commands() -> dict[tuple[str, ...], Any]:
    """Find the commands of the product and of what is installed besides, by the words that call them."""
    return dict(_within((), typer.main.get_command(app), None))


def _within(words: tuple[str, ...], command: Any, above: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    context = command.context_class(command, info_name=words[-1] if words else "choreo", parent=above)
    if not hasattr(command, "list_commands"):
        yield words, command
    else:
        for name in command.list_commands(context):
            yield from _within((*words, name), command.get_command(context, name), context)


def install(folder: Path, site: Path) -> None:
    """Write metadata of the distribution in one folder into another, a folder of packages."""
    project = _project(folder)
    about = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{ENTRY_POINTS}]", *(f"{name} = {place}" for name, place in commands_in(folder).items())]
    (about / "entry_points.txt").write_text("\n".join(lines))


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project
