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


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted", ["", "from choreo_agents.engine.engine import Engine", "import transformers", "import choreo_ray.fleet"]
)
def test_only_public_names_are_imported(planted: str, tmp_path: Path) -> None:
    shutil.copy(HERE / "pyproject.toml", tmp_path)
    shutil.copytree(HERE / "choreo_ray", tmp_path / "choreo_ray")
    with (tmp_path / "choreo_ray" / "far.py").open("a") as file:
        file.write(f"\n{planted}\n")
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    assert (done.returncode == 0) is not bool(planted)
