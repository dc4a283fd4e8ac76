"""`choreo inspect record`, `choreo replay` and `choreo fork`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents import Engine, Memory
from choreo_agents.cli import app
from choreo_agents.workflows.graphs.debate import graph

DEBATE = "choreo_agents.workflows.graphs.debate:graph"
QUESTION = {"messages": [("user", "What does Ann have?")]}


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    with Engine.load(memory=Memory(kv_budget_bytes=1 << 25)) as engine:
        compiled = graph().compile(engine=engine)
        with engine.record(path):
            compiled.invoke(QUESTION)
    yield str(path)


def test_help_lists_the_commands() -> None:
    out = run("--help")
    assert "replay" in out and "fork" in out
    assert "record" in run("inspect", "--help")


def test_a_recording_is_shown(recording: str) -> None:
    out = run("inspect", "record", recording)
    assert "run 1: done" in out and "What does Ann have?" in out and "Ann has 7 blue cups." in out
    said = sorted(line.split()[0] for line in out.splitlines() if "Ann has" in line)
    assert said == ["Alice", "Alice", "Bruno", "Bruno", "Clara", "Clara"]


def test_a_replay_that_is_the_same_ends_with_0(recording: str) -> None:
    out = run("replay", DEBATE, recording)
    assert "6 of 6 calls match the recording" in out and ", 0 sampled." in out
    found = json.loads(run("replay", DEBATE, recording, "--json"))
    assert found["same"] is True and [call["outcome"] for call in found["calls"]] == ["taken"] * 6


def test_what_differs_is_named_and_ends_with_1(recording: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another_debate.py").write_text(
        "from choreo_agents.workflows.graphs.debate import graph as debate\n"
        "def graph():\n"
        "    return debate().with_system('Clara', 'Ann has 5 old lamps.')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    out = run("replay", "another_debate:graph", recording, code=1)
    assert "calls that differ from the recording" in out and "Clara" in out and "view" in out
    assert "2 of 6 calls match the recording" in out


def test_a_fork_shows_what_changed_and_is_recorded_itself(recording: str, tmp_path: Path) -> None:
    change = ("--set", "Clara.system=Ann has 5 old lamps.")
    out = run("fork", DEBATE, recording, *change)
    assert "calls that differ from the recording" in out and "Clara" in out
    found = json.loads(run("fork", DEBATE, recording, *change, "--json"))
    assert [call["outcome"] for call in found["calls"]][:3] == ["taken", "taken", "changed"]
    again = tmp_path / "fork.jsonl"
    out = run("fork", DEBATE, recording, "--set", "Clara:1.words=No.", "--record", str(again))
    assert "No." in out and "No." in run("inspect", "record", str(again))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("replay", DEBATE, "missing.jsonl"), "missing.jsonl"),
        (("replay", "nowhere", "{recording}"), "a graph must be named as module:graph"),
        (("fork", DEBATE, "{recording}", "--set", "x"), "NAME=VALUE"),
        (("fork", DEBATE, "{recording}", "--set", "Alice.words=No."), "a call must be NODE:NUMBER"),
        (("fork", DEBATE, "{recording}", "--set", "Dora.system=No."), "nothing named"),
    ],
    ids=str,
)
def test_what_cannot_be_run_again_ends_with_2(recording: str, arguments: tuple[str, ...], says: str) -> None:
    out = run(*(each.format(recording=recording) for each in arguments), code=2)
    assert says in out.replace("\n", " ")


def test_a_recording_that_is_not_whole_says_so(recording: str, tmp_path: Path) -> None:
    lines = Path(recording).read_bytes().splitlines(keepends=True)
    cut = tmp_path / "run.jsonl"
    cut.write_bytes(b"".join(lines[: len(lines) * 2 // 3]) + lines[-2][:9])
    (tmp_path / "run.jsonl.key").write_bytes(Path(f"{recording}.key").read_bytes())
    assert "incomplete" in run("inspect", "record", str(cut))
    assert "it was replayed up to there" in run("replay", DEBATE, str(cut)).replace("\n", " ")
