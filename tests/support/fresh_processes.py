"""Processes that have never seen a run, for it to go on in: `python -m support.fresh_processes MODEL [--bf16]`.

A start takes seconds. So some stand by that have imported everything and loaded the model, each for one leg of a run
after the other, but never for two of the same.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.broken_runs import Heard, Leg, heard_on

ROOT = Path(__file__).parents[2]
_SERVES = 12
"""Legs, then a process is replaced: those of as many runs."""


class FreshProcesses:
    """Those of one model.

    Args:
        model: Its folder.
        half: Whether it is loaded in bf16.
        spares: How many stand by.
    """

    def __init__(self, model: Path, *, half: bool = False, spares: int = 2) -> None:
        self._command = [sys.executable, "-m", __name__, str(model), *(["--bf16"] if half else [])]
        self._spares = [_Process(self._command) for _ in range(spares)]

    def heard_on(self, leg: Leg) -> Heard:
        """Have a process go a leg that has not gone one of the same run: not one of the last so many as stand by.

        Raises:
            AssertionError: It has failed there; with what it has raised.
        """
        process = self._spares.pop(0)
        outcome, heard = process.asked(leg)
        if process.served < _SERVES:
            self._spares.append(process)
        else:
            process.close()
            self._spares.append(_Process(self._command))
        assert isinstance(heard, Heard), f"{outcome}: {heard}"
        return heard

    def close(self) -> None:
        for process in self._spares:
            process.close()


class _Process:
    def __init__(self, command: list[str]) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "random"}
        self.served = 0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )

    def asked(self, leg: Leg) -> tuple[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self.served += 1
        self._process.stdin.write(base64.b64encode(pickle.dumps(leg)) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process has ended with {self._process.wait()}"
        outcome: tuple[str, Any] = pickle.loads(base64.b64decode(line))
        return outcome

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


@contextmanager
def fresh_processes(model: Path, **options: Any) -> Iterator[FreshProcesses]:
    """Processes that end with the block."""
    processes = FreshProcesses(model, **options)
    try:
        yield processes
    finally:
        processes.close()


def main(model: str, *options: str) -> None:
    """Go legs as they come on stdin, and tell what is heard on stdout."""
    import torch

    from choreo_agents.models import load_model, loader

    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    torch.set_num_threads(1)
    loader.usual_device = lambda: "cpu"
    loaded = load_model(model, **({"dtype": torch.bfloat16} if "--bf16" in options else {}))
    for line in sys.stdin.buffer:
        try:
            outcome: tuple[str, Any] = "heard", heard_on(pickle.loads(base64.b64decode(line)), loaded)
        except BaseException:
            outcome = "failed", traceback.format_exc()
        told.write(base64.b64encode(pickle.dumps(outcome)) + b"\n")
        told.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
