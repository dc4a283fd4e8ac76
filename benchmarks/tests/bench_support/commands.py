"""The `choreo` command: in this process, and as processes that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from choreo_agents.cli import app

PROCESS = """
import json, os, sys
import transformers
from choreo_bench.distilling import teaching
from choreo_bench import playing
from choreo_bench.synthesizers import own_merges
from choreo_agents.cli import main
exec(os.environ.get("CHOREO_TEST_BEFORE", ""))
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.argv = ["choreo", *json.loads(line)]
        sys.stdout = sys.stderr = open(os.devnull, "w")
        main()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Runs one command after the other, each in a process of its own that need not import everything again."""


def choreo(*arguments: str, code: int = 0, columns: int = 200) -> Any:
    """Run `choreo` in this process, as if these words had been typed; require its exit code, and no traceback."""
    with patch.object(sys, "argv", ["choreo", *arguments]):
        result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


class Choreo:
    """The `choreo` command, to be killed at will.

    Args:
        before: Python that its processes run first.
    """

    def __init__(self, before: str = "") -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep), "CHOREO_TEST_BEFORE": before},
        )

    def start(self, *arguments: str) -> int:
        """The new process."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps(arguments) + "\n")
        self._parent.stdin.flush()
        return self._number()

    def ended(self) -> int:
        """Its exit code, once it has one."""
        return self._number()

    def killed(self, *arguments: str, when: Callable[[], bool]) -> None:
        """Start it, and kill it as soon as something is so."""
        process = self.start(*arguments)
        deadline = time.monotonic() + 60
        while not when():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(process, signal.SIGKILL)
        code = self.ended()
        assert code == -signal.SIGKILL, f"it ended with {code} before it was killed"

    def _number(self) -> int:
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(30)
