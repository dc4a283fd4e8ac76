"""Commands of workflows as they are typed, and the files that they read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from choreo_agents.cli import app


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command, as one line each."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stdout.split()), " ".join(result.stderr.split())


def refused(*arguments: str, code: int = 1) -> str:
    return " ".join(" ".join(run(*arguments, code=code)).replace("│", " ").split())  # typer's boxes break lines


def written(path: Path, items: list[Any]) -> str:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in items) + "\n")
    return str(path)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]
