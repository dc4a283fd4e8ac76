"""Who may import what is a failing check: each contract is seen to fail, on a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

PLANTED = {
    "Imports only point down; siblings do not know each other": ("kv/blocks.py", "choreo_agents.engine.engine"),
    "Siblings do not import each other in circles": ("pml/compiler.py", "choreo_agents.pml.library"),
    "Only models and training know transformers and tokenizers": (
        "synthesis/mapper.py",
        "transformers",
    ),
    "Only models.constraints knows llguidance": ("engine/constraints.py", "llguidance"),
    "Only graph knows langgraph": ("workflows/playing.py", "langgraph.graph"),
    "Only testing.plugin knows pytest": ("testing/conformance.py", "pytest"),
    "What decides touches no tensors": ("runtime/scheduler.py", "torch"),
}
"""By the contract that it breaks: a file, and what it imports."""


def test_the_product_knows_nothing_of_its_benchmarks() -> None:
    """Also where no import would show it."""
    product = (ROOT / "choreo_agents").rglob("*.py")
    assert not [path for path in product if "choreo_bench" in path.read_text()]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's Python files, and the contracts."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in (ROOT / "choreo_agents").rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return folder


def broken(folder: Path) -> set[str]:
    """The contracts that a copy does not keep."""
    everything = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, check=False)
    ends = re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*\))?$", done.stdout, re.MULTILINE)  # with the imports it ignores
    found = {name for name, end in ends if end == "BROKEN"}
    assert {name for name, _ in ends} == {contract["name"] for contract in CONTRACTS}, done.stdout + done.stderr
    assert done.returncode == bool(found)
    return found


def test_the_package_keeps_all_contracts(copied: Path) -> None:
    assert broken(copied) == set()


def test_every_contract_is_seen_to_fail() -> None:
    assert PLANTED.keys() == {contract["name"] for contract in CONTRACTS}


@pytest.mark.parametrize("contract", PLANTED)
def test_an_import_that_is_planted_breaks_its_contract(copied: Path, contract: str) -> None:
    file, imported = PLANTED[contract]
    path = copied / "choreo_agents" / file
    source = path.read_text()
    path.write_text(f"{source}\nimport {imported}\n")
    try:
        assert contract in broken(copied)
    finally:
        path.write_text(source)


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("training/tuned.py", "transformers"),
    ],
)
def test_who_may_import_it_may(copied: Path, file: str, imported: str) -> None:
    path = copied / "choreo_agents" / file
    source = path.read_text()
    path.write_text(f"{source}\nimport {imported}\n")
    try:
        assert broken(copied) == set()
    finally:
        path.write_text(source)
