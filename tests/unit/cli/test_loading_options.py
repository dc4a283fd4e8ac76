"""Every command that loads a model takes the same three options for how."""

from __future__ import annotations

from typing import Any

import pytest
from support.installed import own_commands
from typer.testing import CliRunner

from choreo_agents.cli import app

COMMANDS = own_commands()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_who_takes_a_model_says_how_it_is_loaded(words: tuple[str, ...]) -> None:
    options = {option.name: option.default for option in COMMANDS[words].params}
    assert "loading" not in options, "the options stand in its place"
    if "model" in options:
        assert {"device", "dtype", "prepacked"} <= options.keys()
        assert options["device"] == "auto" and options["prepacked"] is True


def test_what_is_said_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def refuse(name: str, **options: Any) -> None:
        asked.append(options)
        raise ValueError("enough")

    monkeypatch.setattr("choreo_agents.models.load_model", refuse)
    for words in ([], ["--device", "cuda:1", "--dtype", "fp16", "--no-prepacked"]):
        assert CliRunner().invoke(app, ["inspect", "memory", *words]).exit_code == 1
    assert asked == [
        {"device": "auto", "dtype": "auto", "prepacked": True},
        {"device": "cuda:1", "dtype": "fp16", "prepacked": False},
    ]
