"""What is added to `choreo`: the table says what commands say themselves, and each of them is where it says."""

from __future__ import annotations

import inspect

import pytest
from support.installed import BENCHMARKS, all_commands

from choreo_agents.cli.lazy import click_command
from choreo_agents.workflows.cases import CASES

OURS = all_commands()
ADDED = {words: command for words, command in all_commands(BENCHMARKS).items() if words not in OURS}


@pytest.mark.parametrize("words", ADDED, ids=" ".join)
def test_the_table_says_what_the_command_says(words: tuple[str, ...]) -> None:
    made = click_command(words[-1], ADDED[words])
    assert made.name == words[-1]
    assert ADDED[words].help == " ".join(inspect.cleandoc(made.help).split("\n\n")[0].split())


@pytest.mark.parametrize("words", ADDED, ids=" ".join)
def test_who_takes_a_model_says_how_it_is_loaded(words: tuple[str, ...]) -> None:
    options = inspect.signature(ADDED[words].load()).parameters
    assert "loading" not in options, "the options stand in its place"
    if "model" in options or "models" in options:
        assert {"device", "dtype", "prepacked"} <= options.keys()
        assert options["device"].default == "auto" and options["prepacked"].default is True


def test_every_workflow_is_scored_and_distilled() -> None:
    for above in (("eval",), ("train", "distill")):
        assert {(*above, name.replace("_", "-")) for name in CASES} <= ADDED.keys()
