"""Distributions as pip would install them: by their metadata `choreo` finds the commands that they add."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from choreo_agents.cli.commands import CHOREO
from choreo_agents.cli.lazy import ENTRY_POINTS, Command, Group, found

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SERVER = ROOT / "integrations" / "server"


def commands_in(folder: Path) -> dict[str, str]:
    """Read which commands the pyproject.toml in a folder declares: by name, where they are."""
    declared: dict[str, str] = _project(folder)["entry-points"][ENTRY_POINTS]
    return declared


def all_commands(*folders: Path) -> dict[tuple[str, ...], Command]:
    """Find the commands of the product and of distributions that add some, by the words that call them."""
    added = {name: found(place) for folder in folders for name, place in commands_in(folder).items()}
    entries = ((tuple(name.split(".")), member) for name, member in added.items())
    return dict(each for words, member in (((), CHOREO), *entries) for each in _within(words, member))


def _within(words: tuple[str, ...], member: Command | Group) -> Iterator[tuple[tuple[str, ...], Command]]:
    if isinstance(member, Command):
        yield words, member
    else:
        for name, each in member.members.items():
            yield from _within((*words, name), each)


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
