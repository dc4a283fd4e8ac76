"""Who may import what is a failing check: each contract is seen to fail, on a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


SETTINGS = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["importlinter"]
CONTRACTS = [contract["name"] for contract in SETTINGS["contracts"]]
PLANTED = (
    ("Only what", "client.py", "from choreo_agents.engine.engine import Engine"),
    ("Only what", "client.py", "from choreo_agents.engine.delegation import Request"),
    ("Only what", "remote/fleet.py", "from choreo_agents.runtime.request import Request"),
    ("Only what", "remote/fleet.py", "from choreo_agents.kv.cache import KVCache"),
    ("It needs neither", "client.py", "import transformers"),
    ("Routers know", "client.py", "import choreo_ray.fleet"),
    ("Routers know", "remote/fleet.py", "import choreo_ray.naming"),
    ("Remote engines", "remote/fleet.py", "import ray"),
    ("Siblings", "remote/protocol.py", "import choreo_ray.remote.fleet"),
)
"""How the contract begins that is broken, a file, and what it imports."""


def broken(folder: Path) -> list[str]:
    """The contracts that a copy does not keep."""
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT))), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    return [name for name in CONTRACTS if f"{name} BROKEN" in done.stdout]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package, and the contracts."""
    shutil.copy(HERE / "pyproject.toml", tmp_path)
    shutil.copytree(HERE / "choreo_ray", tmp_path / "choreo_ray")
    return tmp_path


@pytest.mark.slow
def test_the_package_keeps_all_contracts(copied: Path) -> None:
    assert broken(copied) == []


@pytest.mark.slow
@pytest.mark.parametrize(("contract", "file", "planted"), PLANTED)
def test_an_import_that_is_planted_breaks_its_contract(copied: Path, contract: str, file: str, planted: str) -> None:
    with (copied / "choreo_ray" / file).open("a") as source:
        source.write(f"\n{planted}\n")
    assert [name for name in broken(copied) if name.startswith(contract)]


def test_every_contract_is_seen_to_fail() -> None:
    assert [name for name in CONTRACTS if not name.startswith(tuple(begins for begins, _, _ in PLANTED))] == []
