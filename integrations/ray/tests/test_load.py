"""The scripts that measure, each at its smallest: they end, and say what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOAD, ROOT = Path(__file__).parents[1] / "load", Path(__file__).parents[3]


def printed(script: str, address: str, *arguments: str) -> str:
    """What a script prints; its actors are on the cluster of the tests."""
    paths = [str(ROOT), str(ROOT / "integrations/ray"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_ADDRESS": address}
    done = subprocess.run(
        [sys.executable, str(LOAD / script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_crossing_to_an_actor_costs(alone: None, address: str, tmp_path: Path) -> None:
    asked = ["--rounds", "1", "--calls", "3", "--tokens", "8", "--json", str(tmp_path / "found.json")]
    assert printed("overhead.py", address, *asked).splitlines()[-1].startswith("over")
    found = json.loads((tmp_path / "found.json").read_text())
    assert all(found[name][what] > 0 for name in ("engine", "front", "ray") for what in ("call", "first", "token"))


@pytest.mark.slow
def test_what_two_actors_gain_and_when_a_copy_is_quicker(alone: None, address: str, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.png")]
    assert "two actors" in printed("scale_out.py", address, "--debates", "2", "--repeats", "1", *files)
    found = json.loads((tmp_path / "found.json").read_text())
    tokens = 2 * 3 * 2 * 48
    assert [each[0]["tokens"] for each in found["debates"].values()] == [tokens] * 3
    assert all(each["bytes"] == 2048 * each["tokens"] and each["copied_s"] > 0 for each in found["break_even"])
    assert (tmp_path / "found.png").stat().st_size > 0
