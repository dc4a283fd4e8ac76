"""Run a command in a group of its own, which ends as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

TIMED_OUT = 124
"""The exit status of a command that was stopped, as `timeout` has it."""


def run_to_end(
    command: Sequence[str],
    folder: os.PathLike[str],
    longest_s: float,
    added: dict[str, str],
    output: IO[str] | None = None,
) -> int:
    """Run a command; its exit status. After `longest_s`, or on an interrupt, all that it has started is killed.

    Args:
        command: Its words.
        folder: The working directory.
        longest_s: After so many seconds it is stopped.
        added: What its environment has beside ours.
        output: Where it prints; None: where we do.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | added,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(longest_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
