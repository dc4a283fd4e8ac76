"""`choreo serve` as an entry point adds it to `choreo`: where it is, and what a list says of it."""

from __future__ import annotations

from choreo_agents.cli.lazy import Command

SERVE = Command("choreo_server.command:serve", "Serve a model to every program that speaks OpenAI's protocol.")
