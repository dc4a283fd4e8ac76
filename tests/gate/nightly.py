"""Run what does not gate, from end to end whatever fails, and print one table.

Each row is a command with a log of its own in `build/nightly/COMMIT/`. A row that has ended is not run again for the
same commit, so a run that was cut off goes on where it was; `--again` forgets them. Seeds are drawn from the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

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


def rows(seed: int) -> Iterator[Row]:
    """Yield all that is run, most telling first."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-m", "", "-n", "2", "--dist", "worksteal")
    nightly = (*pytest, "--lane", "nightly")
    yield Row("properties", (*pytest, "--hypothesis-profile", "nightly", f"--hypothesis-seed={seed}", "tests/property"))
    yield Row("parity", (*pytest, "tests/parity", "tests/conformance"))
    yield Row("slow", (*nightly, "tests", "--ignore", "tests/integration/lab", "--ignore", "tests/unit/lab"))
    yield Row("integrations", (*nightly, "integrations", "--ignore", "integrations/ray"))
    yield Row("lab", (*nightly, "tests/integration/lab", "tests/unit/lab"))
    yield Row("ray", (python, "-m", "pytest", "-m", "", "-n", "1", "--lane", "nightly", "integrations/ray"))
    yield Row("kernels", (python, "tests/under_other_kernels.py", "-n", "2"))
    yield Row("facade-on-ray", ("make", "test-elsewhere"))
    durable = (python, "-m", "torture.durable", "--seed", str(seed))
    yield Row("kills-sqlite", durable, "tests")
    yield Row("kills-postgres", (*durable, "--store", "postgres", "--kills", "60"), "tests")
    chaos = (python, "-m", "torture.chaos", "--engines", "40", "--directories", "8", "--folder", "build/chaos")
    yield Row("chaos", chaos, "tests:integrations/ray")
    yield Row("torture", ("make", "torture", f"OPTIONS=--seconds 120 --seed {seed}"))
    yield Row("triton", ("make", "test-triton"))
    yield Row("browser", ("make", "page-check", "test-browser"))
    yield Row("docs", ("make", "docs", "notebook"))
    yield Row("package", (python, "tests/installation/package_check.py"))
    yield Row("mutants", (python, "tests/mutation/mutants.py"))


def run(row: Row, log: Path) -> Ended:
    """Run a row to its end; it is stopped, and red, after an hour."""
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": row.path}
    with log.open("w") as output:
        try:
            status = subprocess.run(
                row.command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=LONGEST_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    counted = [line for line in lines if _COUNTS.search(line) and " in " in line]
    said = ", ".join(" ".join(each) for each in _COUNTS.findall(counted[-1])) if counted else (lines or [""])[-1]
    return Ended(row.name, status, time.monotonic() - began, said[:100])


def main() -> int:
    """Run the rows that have not ended for this commit, and print the table; 1 if any is red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows (default: all)")
    parser.add_argument("--again", action="store_true", help="run rows again that have ended")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    seed = int(commit[:8], 16)
    folder = ROOT / "build" / "nightly" / commit[:12]
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in rows(seed) if not options.rows or row.name in options.rows]
    if unknown := set(options.rows) - {row.name for row in chosen}:
        parser.error(f"there are no rows {sorted(unknown)}; there are {[row.name for row in rows(seed)]}")
    print(
        f"commit {commit[:12]}, seed {seed}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        flush=True,
    )
    ended = []
    for row in chosen:
        record = folder / f"{row.name}.json"
        if record.exists() and not options.again:
            ended.append(Ended(**json.loads(record.read_text())))
        else:
            print(f"{row.name} ... ({folder.relative_to(ROOT)}/{row.name}.log)", flush=True)
            ended.append(run(row, folder / f"{row.name}.log"))
            record.write_text(json.dumps(asdict(ended[-1])))
    print(f"\n| {'row':16} | {'':6} | {'seconds':>7} | |\n|---|---|--:|---|")
    for each in ended:
        print(f"| {each.name:16} | {'FAILED' if each.status else 'ok':6} | {each.seconds:7.0f} | {each.said} |")
    return int(any(each.status for each in ended))


if __name__ == "__main__":
    sys.exit(main())
