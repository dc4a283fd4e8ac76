"""It imports public names alone: the contract is seen to fail, on a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def kept(folder: Path) -> bool:
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT))), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("planted", ["", "from choreo_agents.engine.engine import Engine", "import langgraph"])
def test_only_public_names_are_imported(planted: str, tmp_path: Path) -> None:
    shutil.copy(HERE / "pyproject.toml", tmp_path)
    shutil.copytree(HERE / "langchain_choreo", tmp_path / "langchain_choreo")
    with (tmp_path / "langchain_choreo" / "place.py").open("a") as file:
        file.write(f"\n{planted}\n")
    assert kept(tmp_path) is not bool(planted)
