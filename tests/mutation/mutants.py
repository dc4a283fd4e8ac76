"""Breaks the product on purpose, one place at a time, and looks whether the tests that should notice do.

`tests/mutants.toml` says which text in which file becomes what, and which tests must fail then. A mutant whose text is
not found once is an error, and so are tests that fail without it.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from random import Random

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from gate.plugin import read_list, reason_in  # noqa: E402

LIST = ROOT / "tests" / "mutants.toml"
COPIED = (
    "choreo_agents",
    "integrations",
    "tests",
    "examples",
    "docs",
    "conftest.py",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "CHANGELOG.md",
)
AT_ONCE = 2
LONGEST_S = 240.0
"""A mutant that makes its tests hang is noticed by that."""
FAILED = 1
"""What pytest returns if tests have failed; anything but this and 0 means that it could not run them."""


@dataclass(frozen=True)
class Mutant:
    """One deliberate fault."""

    name: str
    file: str
    found: str
    """The text that is there, once."""
    becomes: str
    tests: tuple[str, ...]
    """By node id, as pytest takes them: at least one of them must fail."""

    def planted(self, source: str) -> str:
        """The file with the fault in it.

        Raises:
            ValueError: Its place is not there any more, or not only once.
        """
        if source.count(self.found) != 1:
            raise ValueError(f"{self.found!r} stands {source.count(self.found)} times in {self.file}, not once")
        return source.replace(self.found, self.becomes)


@dataclass(frozen=True)
class Outcome:
    """What the tests of a mutant said."""

    mutant: Mutant
    code: int | None
    """pytest's; None: they took too long, which is noticing, too."""
    seconds: float
    output: str

    @property
    def is_killed(self) -> bool:
        return self.code in (None, FAILED)


def in_gate(tests: Sequence[str]) -> list[str]:
    """Choose the tests that gate: what only nightly would notice is not noticed when it lands."""
    nightly = read_list("nightly")
    return [test for test in tests if reason_in(nightly, test) is None]


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """The mutants of the list, whose names must differ."""
    listed = tomllib.loads(path.read_text())["mutant"]
    found = [Mutant(each["name"], each["file"], each["from"], each["to"], tuple(each["tests"])) for each in listed]
    assert len({mutant.name for mutant in found}) == len(found), "two mutants have one name"
    return found


@contextmanager
def copies(count: int) -> Iterator[Queue[Path]]:
    """So many copies of what tests need, to be broken one after the other."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free: Queue[Path] = Queue()
        for number in range(count):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(source, copy)
            free.put(copy)
        yield free


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """pytest's code in a copy, or None if it took too long, and what it said at the end."""
    # Actors of Ray's find the copy by this path alone.
    path = os.pathsep.join(map(str, (folder, folder / "integrations" / "ray")))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return None, f"more than {LONGEST_S:g} s"
    return done.returncode, (done.stdout + done.stderr)[-2000:]


def tried(mutant: Mutant, free: Queue[Path]) -> Outcome:
    """What its tests say of a mutant, in a copy that nobody else has."""
    folder, start = free.get(), time.monotonic()
    path = folder / mutant.file
    source = path.read_text()
    try:
        path.write_text(mutant.planted(source))
        code, output = run_tests(folder, in_gate(mutant.tests) or mutant.tests)
    finally:
        path.write_text(source)
        free.put(folder)
    return Outcome(mutant, code, time.monotonic() - start, output)


def main(options: Sequence[str]) -> int:
    """Tries all mutants, or `--sample N` of them, or those whose name has one of the words given."""
    words = [*options]
    count = int(words.pop(words.index("--sample") + 1)) if "--sample" in words else None
    words = [word for word in words if word != "--sample"]
    mutants = read_mutants()
    stale = [error for error in map(staleness, mutants) if error]
    for error in stale:
        say(f"STALE     {error}")
    chosen = [mutant for mutant in mutants if not words or any(word in mutant.name for word in words)]
    if count is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        chosen = Random(commit).sample(chosen, min(count, len(chosen)))
    if not chosen or stale:
        say("no mutant has such a name" if not chosen else "mend the list first")
        return 2
    start = time.monotonic()
    with copies(AT_ONCE) as free, ThreadPoolExecutor(AT_ONCE) as pool:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        code, output = run_tests(free.queue[0], tests)
        if code:
            say(f"the tests fail without any mutant:\n{output}")
            return 2
        say(f"{len(tests)} tests are green, and are now asked about {len(chosen)} mutants")
        outcomes = []
        for outcome in pool.map(lambda mutant: tried(mutant, free), chosen):
            outcomes.append(outcome)
            word = "killed  " if outcome.is_killed else "SURVIVED" if outcome.code == 0 else "ERROR   "
            late = "" if in_gate(outcome.mutant.tests) else " (by nightly's tests: the gate has none)"
            say(f"{word} {outcome.seconds:5.1f} s  {outcome.mutant.name}{late}")
            if outcome.code not in (None, 0, FAILED):
                say(outcome.output)
    killed = [outcome.mutant for outcome in outcomes if outcome.is_killed]
    late = f"{sum(not in_gate(mutant.tests) for mutant in killed)} of them by nightly's tests alone"
    say(f"{len(killed)} of {len(chosen)} mutants were killed, {late}, in {time.monotonic() - start:.0f} s")
    return int(len(killed) < len(chosen))


def staleness(mutant: Mutant) -> str:
    """Why a mutant cannot be planted or tried any more; empty if it can."""
    try:
        ast.parse(mutant.planted((ROOT / mutant.file).read_text()))
        missing = [test for test in mutant.tests if not _is_there(test)]
    except (SyntaxError, ValueError, OSError) as error:
        return f"{mutant.name}: {error}"
    if missing or not mutant.tests:
        return f"{mutant.name}: there is no test {missing[0]!r}" if missing else f"{mutant.name}: no test is named"
    return ""


def _is_there(test: str) -> bool:
    """Whether a file has the test that a node id names; which cases it has is pytest's to say."""
    path, _, name = test.partition("::")
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, functions)]
    return name.partition("[")[0] in defined


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
