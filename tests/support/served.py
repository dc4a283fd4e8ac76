"""`choreo serve` as a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN_S = 120.0
"""Seconds that it has for that on a machine that does other things, too."""
PATHS = (str(ROOT), str(ROOT / "integrations/server"))


@dataclass
class Served:
    """A server that is running."""

    process: subprocess.Popen[bytes]
    port: int
    said: str = ""
    """What it has said on stderr, once it has ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self, key: str = "") -> dict[str, float]:
        """What it tells of itself."""
        asked = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=10) as told:
            lines = told.read().decode().splitlines()
        return numbers(lines)


def numbers(lines: list[str]) -> dict[str, float]:
    """What lines of metrics say, by names without what all of ours begin and totals end with."""
    pairs = (line.rsplit(maxsplit=1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("choreo_").removesuffix("_total"): float(value) for name, value in pairs}


def environment() -> dict[str, str]:
    """That of this process, in which ours is found."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])}


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A server, which is there when the block begins and has ended when it has."""
    port = free_port()
    command = [sys.executable, "-m", "choreo_server", *arguments, "--port", str(port), "--threads", "1"]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment(), stderr=errors)
        served = Served(process, port)
        try:
            until = time.monotonic() + BEGIN_S
            while True:
                try:
                    urllib.request.urlopen(f"{served.url}/health", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        errors.seek(0)
                        raise AssertionError(f"it has not begun: {errors.read().decode()}") from None
                    time.sleep(0.05)
            yield served
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
            errors.seek(0)
            served.said = errors.read().decode()
