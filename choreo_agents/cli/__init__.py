"""The `choreo` command."""

from __future__ import annotations

from choreo_agents.cli.commands import CHOREO
from choreo_agents.cli.lazy import typer_app

app = typer_app(CHOREO)


def main() -> None:
    """Entry point of the `choreo` command."""
    app()


__all__ = ["app", "main"]
