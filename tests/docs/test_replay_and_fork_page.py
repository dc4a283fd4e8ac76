"""The page on replays and forks runs as it is written."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from choreo_agents.cli import app

PAGE = Path(__file__).parents[2] / "docs/how-to/replay-and-fork.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    source = PAGE.read_text()
    module, *blocks = re.findall(r"^```python\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    record, replay, replace, fork, record_fork = blocks
    [shown] = re.findall(r"^```text\n(.*?)^```", source, re.DOTALL | re.MULTILINE)
    commands = re.findall(r"^choreo (.*)$", source, re.MULTILINE)
    assert len(commands) == 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "kites.py").write_text(module)
    names: dict[str, object] = {}
    try:
        for block in (record, replay):
            exec(block, names)
            assert capsys.readouterr().out.count("looking") == 1
        exec(replace, names)
        assert capsys.readouterr().out == shown
        exec(fork, names)
        out = capsys.readouterr().out
        assert "looking" not in out and "tokens sampled" in out
        exec(record_fork, names)
        for command in commands:
            result = CliRunner().invoke(app, shlex.split(command, comments=True), env={"COLUMNS": "160"})
            assert result.exit_code == 0, result.output
    finally:
        if "engine" in names:
            names["engine"].close()  # type: ignore[attr-defined]
        sys.modules.pop("kites", None)
