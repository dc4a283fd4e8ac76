"""`choreo pml check` and `choreo pml layout`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from choreo_agents.cli import app

SCHEMA = """<schema name="travel">
  <system>You plan.</system>
  <user><module name="plan">A trip of <parameter name="days" length="2"/> days.</module>
    <union><module name="miami" cache="false">Miami.</module>
      <module name="paris" confidential="true">Paris and more.</module></union></user>
</schema>
"""


def choreo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pml", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "travel.pml").write_text(SCHEMA)
    (tmp_path / "good.pml").write_text('<prompt schema="travel"><plan days="3"/><paris/></prompt>')
    return tmp_path


def test_good_files(folder: Path) -> None:
    result = choreo("check", "travel.pml", "good.pml")
    assert result.exit_code == 0, result.output
    assert result.stdout == "no problems\n"


def test_all_that_is_wrong_is_listed(folder: Path) -> None:
    (folder / "bad.pml").write_text('<schema name="bad">\n<union/><modul/></schema>')
    (folder / "ask.pml").write_text('<prompt schema="travel">\n<plam/><miami/><paris/></prompt>')
    (folder / "lost.pml").write_text('<prompt schema="travl"/>')
    (folder / "latin.pml").write_bytes(b"\xff")
    result = choreo("check", "travel.pml", "ask.pml", "good.pml", "lost.pml", "latin.pml")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "ask.pml:2:1: schema 'travel' has no module 'plam'; expected 'plan'",
        "ask.pml:2:16: 'miami' and 'paris' are members of one union; expected one of them",
        "lost.pml:1:9: the prompt names schema 'travl'; expected schema='travel'",
        "latin.pml:1:1: the byte 0xff is not UTF-8; expected a file in UTF-8",
        "4 problems",
    ]
    result = choreo("check", "bad.pml", "ask.pml")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "bad.pml:2:1: a <union> has no members; expected <module> inside",
        "bad.pml:2:9: there is no <modul> in a schema; expected 'module'",
        "2 problems",
    ]


def test_a_model_counts_tokens(folder: Path) -> None:
    (folder / "long.pml").write_text('<prompt schema="travel"><plan days="3 4 5"/></prompt>')
    assert choreo("check", "travel.pml", "long.pml").exit_code == 0
    result = choreo("check", "travel.pml", "long.pml", "--model", "embedded")
    assert result.exit_code == 1
    assert "long.pml:1:31: the argument of 'days' has 3 tokens; expected at most 2\n1 problem" in result.output


def test_a_missing_file(folder: Path) -> None:
    for files in (["none.pml"], ["travel.pml", "none.pml"]):
        result = choreo("check", *files)
        assert result.exit_code == 1
        assert "none.pml" in result.output


def test_layout_shows_positions(folder: Path) -> None:
    result = choreo("layout", "travel.pml")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["0–29", "30", "schema", "travel"] or "schema travel" in lines[0]
    for said in (
        "parameter days",
        "module miami, not cached",
        "module paris, confidential",
        "union",
        "tokens are encoded",
    ):
        assert said in result.output
    members = [line for line in lines if "module miami" in line or "module paris" in line]
    first = [
        line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()[0].split("–")[0] for line in members
    ]
    assert first[0] == first[1]
    (folder / "bad.pml").write_text("<schema/>")
    result = choreo("layout", "bad.pml")
    assert result.exit_code == 1
    assert "bad.pml:1:1: <schema> has no name" in result.output
