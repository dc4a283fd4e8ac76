"""The load, for some seconds on the embedded model: no error, no leak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.served import environment

LOAD = Path(__file__).parents[1] / "load/load.py"


@pytest.mark.slow
def test_many_streams_leave_nothing_behind() -> None:
    asked = (
        "--model",
        "embedded",
        "--streams",
        "16",
        "--seconds",
        "4",
        "--warm",
        "1",
        "--window",
        "1",
        "--kv-gib",
        "0.2",
    )
    done = subprocess.run(
        [sys.executable, str(LOAD), *asked], env=environment(), capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answered"] > 16 and found["left"] > 0 and found["failed"] == 0
    assert found["held"]["unfinished"] == 0 and found["server_tokens_per_s"] > 0
