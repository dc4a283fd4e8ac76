"""Run every static check, on all cores, whatever fails; print the output of those that fail or warn, and one table.

Each check is a command that can be run alone. The exit status is 1 if any has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Check:
    """A command that fails when something about the sources is wrong."""

    name: str
    command: tuple[str, ...]
    folder: str = "."

    def shell(self) -> str:
        """The line that runs this check alone, from the project's root."""
        line = " ".join((f"{Path('.venv/bin')}/{self.command[0]}", *self.command[1:]))
        return (
            line
            if self.folder == "."
            else f"(cd {self.folder} && PYTHONPATH=. {os.path.relpath('.', self.folder)}/{line})"
        )


CHECKS = (
    Check("types", ("mypy",)),
    Check("layers", ("lint-imports", "--no-cache")),
    Check("layers of benchmarks", ("lint-imports", "--no-cache"), "benchmarks"),
    Check("layers of langchain", ("lint-imports", "--no-cache"), "integrations/langchain"),
    Check("layers of ray", ("lint-imports", "--no-cache"), "integrations/ray"),
    Check("layers of server", ("lint-imports", "--no-cache"), "integrations/server"),
    Check("format", ("ruff", "format", "--check", ".")),
    Check("lint", ("ruff", "check", ".")),
    Check("weight", ("python", "tests/architecture/weight.py")),
    Check("words", ("python", "tests/architecture/words.py")),
)


@dataclass(frozen=True)
class Outcome:
    """How a check has ended, and what it printed."""

    check: Check
    status: int
    seconds: float
    output: str


def run(check: Check) -> Outcome:
    """Run one check to its end."""
    began = time.monotonic()
    environment = os.environ | ({} if check.folder == "." else {"PYTHONPATH": "."})
    command = [BIN / check.command[0], *check.command[1:]]
    try:
        ended = subprocess.run(
            command,
            cwd=ROOT / check.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except OSError as error:
        return Outcome(check, 127, time.monotonic() - began, str(error))
    return Outcome(check, ended.returncode, time.monotonic() - began, ended.stdout)


def run_all() -> list[Outcome]:
    """Run all checks, and print the output of those that fail or warn, and a table."""
    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        outcomes = list(pool.map(run, CHECKS))
    for outcome in outcomes:
        if outcome.status or "\nwarning:" in outcome.output:
            print(f"\n--- {outcome.check.name}: {outcome.check.shell()}\n{outcome.output.rstrip()}\n")
    for outcome in outcomes:
        print(f"{outcome.check.name:22} {'FAILED' if outcome.status else 'ok':6} {outcome.seconds:6.1f} s", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(any(outcome.status for outcome in run_all()))
