"""`choreo serve --engines`: which engine it loads."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from choreo_server.command import serve
from typer.testing import CliRunner


@pytest.fixture
def command() -> typer.Typer:
    made = typer.Typer()
    made.command()(serve)
    return made


def test_several_engines_are_actors_that_are_asked_for_alike(
    command: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def load(model: str, **options: Any) -> None:
        asked.update(options, model=model)
        raise ValueError("seen enough")

    monkeypatch.setitem(sys.modules, "choreo_ray", SimpleNamespace(RayEngine=SimpleNamespace(load=load)))
    arguments = ["embedded", "--engines", "3", "--rows", "7", "--kv-budget", "0.5", "--threads", "2"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1 and "seen enough" in result.output
    assert (asked["model"], asked["engines"], asked["threads"]) == ("embedded", 3, 2)
    assert asked["scheduling"].rows == 7 and asked["memory"].kv_budget_bytes == 1 << 29


def test_without_the_distribution_it_says_which(command: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "choreo_ray", None)
    result = CliRunner().invoke(command, ["embedded", "--engines", "2"])
    assert result.exit_code == 1 and "pip install choreo-ray" in result.output
