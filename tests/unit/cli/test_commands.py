"""Commands are listed by a table: it says what they say themselves, and each of them is where it says."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.installed import BENCHMARKS, SERVER, all_commands, commands_in, install
from typer.testing import CliRunner

from choreo_agents.cli import app, lazy
from choreo_agents.cli.commands import CHOREO, WORKFLOWS
from choreo_agents.cli.lazy import Command, Group, click_command, typer_app
from choreo_agents.workflows.cases import CASES

runner = CliRunner()


ALL = all_commands(SERVER)


def first_paragraph(help_text: str) -> str:
    return " ".join(inspect.cleandoc(help_text).split("\n\n")[0].split())


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_the_table_says_what_the_command_says(path: tuple[str, ...]) -> None:
    made = click_command(path[-1], ALL[path])
    assert made.name == path[-1]
    assert ALL[path].help == first_paragraph(made.help)
    assert not made.hidden and not made.deprecated


def test_no_two_commands_are_one() -> None:
    assert len({(each.place, each.workflow) for each in ALL.values()}) == len(ALL)


def test_every_workflow_can_be_run() -> None:
    assert list(WORKFLOWS) == list(CASES)
    assert {("run", name.replace("_", "-")) for name in CASES} <= ALL.keys()


@pytest.mark.parametrize("spelled", ["tree-of-thoughts", "tree_of_thoughts"])
def test_a_command_may_be_written_with_underscores(spelled: str) -> None:
    result = runner.invoke(app, ["run", spelled, "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0 and f"choreo run {spelled.replace('_', '-')} --seed 7" in result.output


def test_a_command_that_is_not_there_is_answered_by_those_that_are_like_it() -> None:
    result = runner.invoke(app, ["run", "debat"])
    assert result.exit_code == 2 and "Did you mean 'debate'?" in result.output


def test_nothing_is_imported_to_list_what_cannot_be_imported() -> None:
    broken = typer_app(Group("Broken.", {"gone": Command("choreo_agents.cli.nowhere:gone", "It is listed.")}))
    listed = runner.invoke(broken, ["--help"])
    assert listed.exit_code == 0 and "It is listed." in listed.output
    assert isinstance(runner.invoke(broken, ["gone"]).exception, ModuleNotFoundError)


def test_what_distributions_add_is_known_to_be_elsewhere() -> None:
    groups = {f"{name}.": group for name, group in CHOREO.members.items() if isinstance(group, Group)} | {"": CHOREO}
    known = {prefix + name: package for prefix, group in groups.items() for name, package in group.elsewhere.items()}
    declared = dict.fromkeys(commands_in(BENCHMARKS), "choreo-bench")
    assert known == declared | dict.fromkeys(commands_in(SERVER), "choreo-server")


@pytest.fixture
def greeter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another distribution: a command, a group, members of both ours and its own, and what cannot be loaded."""
    install(BENCHMARKS, tmp_path)
    about = tmp_path / "choreo_greets-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: choreo-greets\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[choreo.commands]\nrun = greets.commands:GREET\nzz = greets.commands:GREET\ngreet = greets.commands:GREET\n"
        "pml.greet = greets.commands:GREET\npml.check = greets.commands:GREET\nmany = greets.commands:MANY\n"
        "many.deep.more = greets.commands:GREET\ngone = greets.gone:GREET\nodd = greets.commands:__name__\n"
    )
    (tmp_path / "greets").mkdir()
    (tmp_path / "greets" / "__init__.py").touch()
    (tmp_path / "greets" / "commands.py").write_text(
        "from choreo_agents.cli.lazy import Command, Group\n"
        "GREET = Command('greets.greet:greet', 'Greets whom it may.')\n"
        "MANY = Group('Greets many.', {'deep': Group('Deeply.', {'greet': GREET})})\n"
    )
    (tmp_path / "greets" / "greet.py").write_text(
        "def greet(name: str) -> None:\n    '''Greets whom it may.'''\n    print('Hi', name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "greets"]:
        del sys.modules[name]


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
    [("greet",), ("pml", "greet"), ("many", "deep", "greet"), ("many", "deep", "more")],
    ids=" ".join,
)
def test_other_distributions_add_commands_groups_and_members_of_groups(words: tuple[str, ...]) -> None:
    *above, name = words
    assert name in listed(*above) and "Greets whom it may." in said(*above, "--help")
    assert "greets.greet" not in sys.modules, "lists import no commands"
    assert said(*words, "Ann") == "loading torch and LangGraph ...\nHi Ann\n"


@pytest.mark.usefixtures("greeter")
def test_what_is_added_stands_behind_ours_and_replaces_none_of_it() -> None:
    assert listed() == [*CHOREO.members, "eval", "bench", "train", "gone", "greet", "many", "odd", "zz"]
    assert listed("pml") == ["check", "layout", "run", "memory", "greet"]
    assert "debate" in said("run", "--help") and "FILE..." in said("pml", "check", "--help")


@pytest.mark.usefixtures("greeter")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gone", "greets.gone:GREET cannot be loaded: ModuleNotFoundError: No module named 'greets.gone'"),
        ("odd", "greets.commands:__name__ cannot be loaded: TypeError: it is neither a Command nor a Group"),
    ],
)
def test_what_cannot_be_loaded_says_why_and_is_in_nobodys_way(name: str, reason: str) -> None:
    assert reason in said("--help")
    assert reason in said(name, "Ann", code=2)
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
    monkeypatch.setattr(lazy, "entry_points", lambda **_: ())
    name = " ".join(words[:2] if words[0] == "pml" else words[:1])
    assert f"'{name}' is not installed: pip install {package}" in said(*words, code=2)
    assert listed() == list(CHOREO.members)
