"""Commands of the product and of other distributions: how they are listed, called, and told from each other."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from support.installed import BENCHMARKS, SERVER, commands_in, install, own_commands
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.synthesis.placing import Strategy
from choreo_agents.terminal import commands
from choreo_agents.workflows.cases import CASES, MergeOptions, QuestionsOptions
from choreo_agents.workflows.graphs.multi_qa import Layout

runner = CliRunner()
CHOICES = ((MergeOptions, "strategy"), (QuestionsOptions, "layout"))
OURS = ["run", "audit", "compare", "replay", "fork", "models", "inspect", "pml"]


def test_there_are_few_commands_and_each_is_told_in_a_line() -> None:
    ours = own_commands()
    assert len({words[:1] if words[0] == "run" else words for words in ours}) <= 15
    for command in ours.values():
        first, _, _ = command.help.partition("\n\n")
        assert first.endswith((".", ").")) and len(first.split()) < 30


def test_every_workflow_can_be_run() -> None:
    assert listed("run") == [name.replace("_", "-") for name in CASES]


def test_choices_that_are_told_without_torch_are_all_that_there_are() -> None:
    strategies, layouts = (each.model_fields[name].annotation for each, name in CHOICES)
    assert [get_args(each) for each in (strategies, layouts)] == [*map(get_args, (Strategy, Layout))]


def test_the_version_is_printed() -> None:
    assert said("--version") == "choreo-agents 0.1.0\n"


@pytest.mark.parametrize("spelled", ["tree-of-thoughts", "tree_of_thoughts"])
def test_a_command_may_be_written_with_underscores(spelled: str) -> None:
    assert "choreo run tree-of-thoughts --seed 7" in said("run", spelled, "--help")


def test_a_command_that_is_not_there_is_answered_by_those_that_are_like_it() -> None:
    result = runner.invoke(app, ["run", "debat"])
    assert result.exit_code == 2 and "Did you mean 'debate'?" in result.output


def test_what_distributions_add_is_known_to_be_elsewhere() -> None:
    declared = dict.fromkeys(commands_in(BENCHMARKS), "choreo-bench")
    assert declared | dict.fromkeys(commands_in(SERVER), "choreo-server") == commands.ELSEWHERE


@pytest.mark.parametrize("words", own_commands(), ids=" ".join)
def test_help_fits_a_screen_of_80_columns(words: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    wide = runner.invoke(app, [*words, "--help"], env={"COLUMNS": "1000"}).output
    narrow, unbroken = (set(re.sub("[─│╭╮╰╯]", " ", text).split()) for text in (result.output, wide))
    assert narrow <= unbroken, "no word is broken"


@pytest.fixture
def greeter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another distribution: a command, a group, members of both ours and its own, and what cannot be loaded."""
    install(BENCHMARKS, tmp_path)
    install(SERVER, tmp_path)
    about = tmp_path / "choreo_greets-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: choreo-greets\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[choreo.commands]\nrun = greets:greet\nzz = greets:greet\ngreet = greets:greet\npml.greet = greets:greet\n"
        "pml.check = greets:greet\nmany = greets:MANY\nplain = greets:PLAIN\nmany.deep.more = greets:greet\n"
        "gone = greets.gone:greet\nodd = greets:__name__\n"
    )
    (tmp_path / "greets.py").write_text(
        "import typer\nfrom choreo_agents.terminal.commands import group\n"
        "def greet(name: str) -> None:\n    '''Greets whom it may.'''\n    print('Hi', name)\n"
        "MANY = group('Greets many.', lambda: {'deep': group('Deeply.', lambda: {'greet': greet})})\n"
        "PLAIN = typer.Typer(help='Greets plainly.')\nPLAIN.command('greet')(greet)\nPLAIN.callback()(lambda: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("greets", None)


def said(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, list(words), env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


def listed(*words: str) -> list[str]:
    """The names of what a group lists."""
    rows = said(*words, "--help").partition("Commands")[2].splitlines()
    return [row.split()[1] for row in rows if row[:1] == "│" and row[2] != " "]


@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(
    "words",
    [("greet",), ("pml", "greet"), ("many", "deep", "greet"), ("many", "deep", "more"), ("plain", "greet")],
    ids=" ".join,
)
def test_other_distributions_add_commands_groups_and_members_of_groups(words: tuple[str, ...]) -> None:
    *above, name = words
    assert name in listed(*above) and "Greets whom it may." in said(*above, "--help")
    assert said(*words, "Ann") == "Hi Ann\n"


@pytest.mark.usefixtures("greeter")
def test_what_is_added_stands_behind_ours_and_replaces_none_of_it() -> None:
    assert listed() == [*OURS, "bench", "eval", "gone", "greet", "many", "odd", "plain", "serve", "train", "zz"]
    assert listed("pml") == ["check", "layout", "run", "greet", "memory"]
    assert "debate" in said("run", "--help") and "[PROMPT]..." in said("pml", "check", "--help")


@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone", "greets.gone:greet cannot be loaded: ModuleNotFoundError: No module named 'greets.gone'"),
        ("odd", "greets:__name__ cannot be loaded: TypeError: 'greets' is not a callable object"),
    ],
)
def test_what_cannot_be_loaded_says_why_and_is_in_nobodys_way(name: str, reason: str) -> None:
    assert reason in said("--help")
    assert reason in said(name, "Ann", "--loudly", code=2)
    assert "Hi Ann" in said("greet", "Ann")


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("serve",), "choreo-server"),
        (("bench",), "choreo-bench"),
        (("eval", "language"), "choreo-bench"),
        (("train", "distill", "debate"), "choreo-bench"),
        (("pml", "memory"), "choreo-bench"),
    ],
    ids=str,
)
def test_what_is_not_installed_is_named(words: tuple[str, ...], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda **_: ())
    name = " ".join(words[:2] if words[0] == "pml" else words[:1])
    assert f"'{name}' is not installed: pip install {package}" in said(*words, code=2)
    assert listed() == OURS
