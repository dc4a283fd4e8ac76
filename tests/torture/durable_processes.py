"""Processes that run threads, as whoever tells and kills them has them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.durable_program import Whereabouts, environment


@dataclass(eq=False)
class Process:
    """One that runs threads, and what has been read of its journal."""

    number: int
    pid: int
    journal: Path
    is_ready: bool = False
    thread: str | None = None
    """Whose leg it runs; None: it is idle."""
    answers: frozenset[str] = frozenset()
    """That stood in the store, of this thread, when the leg began."""
    began_s: float = 0.0
    pipe: int = -1
    """To write to where it reads."""
    _read: int = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it has written since the last time: what it was writing when it was killed is no line."""
        if self.journal.exists():
            with self.journal.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # it may be written meanwhile: the rest of it would be read as a line
                    self._read += len(line)
                    yield json.loads(line)

    @property
    def jobs(self) -> Path:
        """The pipe by which it is told what to run."""
        return self.journal.with_name(self.journal.name + ".jobs")

    def tell(self, **job: str) -> None:
        """Have it run a thread."""
        os.write(self.pipe, json.dumps(job).encode() + b"\n")

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while self.is_alive():
            time.sleep(0.001)
        with suppress(FileNotFoundError):
            self.jobs.unlink()
            os.close(self.pipe)


class Forking:
    """What all processes are forked from: it has loaded the model.

    Args:
        model: Its folder.
        stderr: Where what it prints goes.
    """

    def __init__(self, model: Path, stderr: Path) -> None:
        command = [sys.executable, "-m", "torture.durable_worker", str(model)]
        with stderr.open("ab") as heard:
            self._parent = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=heard, text=True, env=environment()
            )

    def fork(self, number: int, journal: Path, where: Whereabouts) -> Process:
        """A process, which writes this journal."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        process = Process(number, 0, journal)
        os.mkfifo(process.jobs)
        process.pipe = os.open(process.jobs, os.O_RDWR)  # does not wait for who reads
        told = {"store": where.store, "at": where.at, "journal": str(journal), "jobs": str(process.jobs)}
        self._parent.stdin.write(json.dumps(told) + "\n")
        self._parent.stdin.flush()
        process.pid = int(self._parent.stdout.readline())
        return process

    def close(self) -> None:
        """End it, and with it all that it has forked."""
        self._parent.communicate()
