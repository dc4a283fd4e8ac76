"""The `choreo` command."""

from choreo_agents.cli.app import app, main

__all__ = ["app", "main"]
