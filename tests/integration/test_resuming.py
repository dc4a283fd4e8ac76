"""A command that is killed and started again ends with what it would have ended with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from choreo_agents.cli import app

ITEMS, METHODS = 60, ("choreo", "baseline")
COMMAND = ("eval", "direct", "--n", str(ITEMS), "--method", ",".join(METHODS), "--steps", "2", "--kv-gib", "0.05")
PROCESS = """
import json, os, sys
from choreo_agents.cli import main
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


class Choreo:
    """The `choreo` command, to be killed at will."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep)},
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

    def _number(self) -> int:
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(30)


@pytest.fixture(scope="module")
def choreo() -> Iterator[Choreo]:
    made = Choreo()
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    path = tmp_path_factory.mktemp("whole") / "results.jsonl"
    assert CliRunner().invoke(app, [*COMMAND, "--out", str(path)]).exit_code == 0
    return results(path)


def results(path: Path) -> dict[tuple[str, str], Any]:
    """By variant and item, each once."""
    _, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {(record["variant"], record["item"]): record for record in records}
    assert len(found) == len(records), "nothing was done twice"
    return found


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("kills", [(30,), (2, 45, 100)], ids=["once", "several times"])
def test_a_killed_run_goes_on_where_it_stopped(
    choreo: Choreo, uninterrupted: dict[tuple[str, str], Any], tmp_path: Path, kills: tuple[int, ...]
) -> None:
    path = tmp_path / "results.jsonl"
    command = (*COMMAND, "--out", str(path))
    for lines in kills:
        process = choreo.start(*command)
        deadline = time.monotonic() + 60
        while lines_in(path) < lines:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(process, signal.SIGKILL)
        assert choreo.ended() == -signal.SIGKILL
        # Some may have come between the last look and the signal; the line before the results says what they are.
        assert lines - 1 <= len(results_so_far(path)) < len(METHODS) * ITEMS
    before = results_so_far(path)
    choreo.start(*command)
    assert choreo.ended() == 0
    found = results(path)
    assert set(found) == {(method, f"test {number}") for method in METHODS for number in range(ITEMS)}
    assert list(found)[: len(before)] == list(before), "what was known is kept as it was"
    assert found == uninterrupted
    whole = path.read_bytes()
    choreo.start(*command)
    assert choreo.ended() == 0 and path.read_bytes() == whole, "there is nothing left to do"


def results_so_far(path: Path) -> dict[tuple[str, str], Any]:
    """The last line may be torn."""
    whole = path.with_name("whole.jsonl")
    whole.write_bytes(path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1])
    return results(whole)
