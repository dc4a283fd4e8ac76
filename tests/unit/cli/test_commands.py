"""Commands are listed by a table: it says what they say themselves, and each of them is where it says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents.cli import app
from choreo_agents.cli.commands import CHOREO, FROM_LAB, WORKFLOWS
from choreo_agents.cli.lazy import Command, Group, click_command, found, typer_app
from choreo_agents.workflows.cases import CASES

runner = CliRunner()


def commands(group: Group, *above: str) -> Iterator[tuple[tuple[str, ...], Command]]:
    for name, member in group.members.items():
        if isinstance(member, Group):
            yield from commands(member, *above, name)
        else:
            yield (*above, name), member


ALL = dict(commands(CHOREO))


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


@pytest.mark.parametrize("place", FROM_LAB)
def test_what_is_taken_from_the_lab_is_there(place: str) -> None:
    assert found(place)


def test_every_workflow_is_run_scored_and_distilled() -> None:
    assert list(WORKFLOWS) == list(CASES)
    for above in (("run",), ("eval",), ("train", "distill")):
        assert {(*above, name.replace("_", "-")) for name in CASES} <= ALL.keys()


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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution, with a command of its own and one that is called as one of ours."""
    about = tmp_path / "choreo_greets-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: choreo-greets\nVersion: 1\nSummary: Greets.\n")
    (about / "entry_points.txt").write_text("[choreo.commands]\ngreet = greets:greet\nrun = greets:greet\n")
    (tmp_path / "greets.py").write_text(
        "def greet(name: str) -> None:\n    '''Greets whom it may.'''\n    print('Hi', name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_other_distributions_bring_commands_of_their_own() -> None:
    listed = runner.invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert "greet" in listed and "Greets." in listed
    assert runner.invoke(app, ["greet", "Ann"]).stdout == "Hi Ann\n"
    assert "Greets whom it may." in runner.invoke(app, ["greet", "--help"]).output
    assert runner.invoke(app, ["run", "Ann"]).exit_code == 2, "ours cannot be replaced"


def test_what_is_not_installed_is_named() -> None:
    result = runner.invoke(app, ["serve"], env={"COLUMNS": "120"})
    if "Missing argument" not in result.output:
        assert result.exit_code == 2 and "'serve' is not installed: pip install choreo-server" in result.output
