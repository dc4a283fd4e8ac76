"""Run what does not gate, from end to end whatever fails, and print one table.

Each row is a command with a log of its own in `build/nightly/COMMIT/`. A row that has ended is not run again for the
same commit, so a run that was cut off goes on where it was. `--again` forgets them, and so does a tree with changes
that are not committed. Seeds are drawn from the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gate.process import run_to_end
from gate.run import ROOT

LONGEST_S = 3600.0
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error|errors)\b")


@dataclass(frozen=True)
class Row:
    """A part of the nightly run."""

    name: str
    command: tuple[str, ...]
    path: str = ""
    """Folders that Python looks into, beside the installed packages."""


@dataclass(frozen=True)
class Ended:
    """How a row has ended."""

    name: str
    status: int
    seconds: float
    said: str
    """Counts of tests, or else the last line."""


def rows(seed: int, folder: Path) -> Iterator[Row]:
    """Yield all that is run, most telling first; what a row keeps goes into the folder."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-m", "", "-n", "2", "--dist", "worksteal")
    nightly = (*pytest, "--lane", "nightly")
    yield Row("properties", (*pytest, "--hypothesis-profile", "nightly", f"--hypothesis-seed={seed}", "tests/property"))
    own_kernels = ("attention", "models/test_lean.py", "models/test_panels.py", "models/test_prepacked.py", "sampling")
    units = (f"tests/unit/{each}" for each in (*own_kernels, "runtime/test_drawing.py"))
    yield Row("exact", (*pytest, "tests/parity", "tests/conformance", *units))
    yield Row("slow", (*nightly, "tests"))
    yield Row("integrations", (*nightly, "integrations", "--ignore", "integrations/ray"))
    yield Row("benchmarks", (*nightly, "benchmarks"))
    yield Row("ray", (python, "-m", "pytest", "-m", "", "-n", "1", "--lane", "nightly", "integrations/ray"))
    yield Row("kernels", (python, "tests/under_other_kernels.py", "-n", "2"))
    yield Row("facade-on-ray", ("make", "test-elsewhere"))
    kept = ("--seed", str(seed), "--folder")
    durable = (python, "-m", "torture.durable", *kept)
    yield Row("kills-sqlite", (*durable, str(folder / "kills-sqlite")), "tests")
    postgres = (*durable, str(folder / "kills-postgres"), "--store", "postgres", "--kills", "60")
    yield Row("kills-postgres", postgres, "tests")
    chaos = (python, "-m", "torture.chaos", *kept, str(folder / "chaos"), "--engines", "40")
    yield Row("chaos", chaos, "tests:integrations/ray")
    yield Row("torture", ("make", "torture", f"OPTIONS=--seconds 120 --seed {seed}"))
    for target in ("test-triton", "page-check", "test-browser", "docs", "notebook"):
        yield Row(target, ("make", target))
    yield Row("package", (python, "tests/installation/package_check.py"))
    yield Row("mutants", (python, "tests/mutation/mutants.py"))


def run(row: Row, log: Path) -> Ended:
    """Run a row to its end; it is stopped, and red, after an hour."""
    began = time.monotonic()
    with log.open("w") as output:
        status = run_to_end(row.command, ROOT, LONGEST_S, {"PYTHONPATH": row.path}, output)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    counted = [line for line in lines if _COUNTS.search(line) and " in " in line]
    said = ", ".join(" ".join(each) for each in _COUNTS.findall(counted[-1])) if counted else (lines or [""])[-1]
    return Ended(row.name, status, time.monotonic() - began, said[:100])


def git(*words: str) -> str:
    """Ask git about this tree."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Run the rows that have not ended for this commit, and print the table; 1 if any is red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows (default: all)")
    parser.add_argument("--again", action="store_true", help="run rows again that have ended")
    options = parser.parse_args()
    commit = git("rev-parse", "HEAD")[:12]
    changed = bool(git("status", "--porcelain"))
    folder = ROOT / "build" / "nightly" / (f"{commit}-changed" if changed else commit)
    if changed or (options.again and not options.rows):
        shutil.rmtree(folder, ignore_errors=True)  # what is not committed has no name by which to find its outcomes
    folder.mkdir(parents=True, exist_ok=True)
    seed = int(commit[:8], 16)
    known = list(rows(seed, folder))
    if unknown := set(options.rows) - {row.name for row in known}:
        parser.error(f"there are no rows {sorted(unknown)}; there are {[row.name for row in known]}")
    print(f"commit {folder.name}, seed {seed}, {platform.machine()}, {os.cpu_count()} cores", flush=True)
    ended = []
    for row in known:
        if options.rows and row.name not in options.rows:
            continue
        record = folder / f"{row.name}.json"
        if record.exists() and not options.again:
            ended.append(Ended(**json.loads(record.read_text())))
            continue
        print(f"{row.name} ... ({folder.relative_to(ROOT)}/{row.name}.log)", flush=True)
        ended.append(run(row, folder / f"{row.name}.log"))
        written = record.with_suffix(".partial")
        written.write_text(json.dumps(asdict(ended[-1])))
        written.replace(record)
    print(f"\n| {'row':16} | {'':6} | {'seconds':>7} | |\n|---|---|--:|---|")
    for each in ended:
        print(f"| {each.name:16} | {'FAILED' if each.status else 'ok':6} | {each.seconds:7.0f} | {each.said} |")
    return int(any(each.status for each in ended))


if __name__ == "__main__":
    sys.exit(main())
