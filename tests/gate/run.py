"""Run what gates a change: the static checks, the gate's tests on two workers, the timing lane one by one.

All of it runs, whatever fails; failures are printed when they happen. At the end stand one table, each failure with the
command that runs it alone, and one exit status.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gate import check

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "build" / "gate"
KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
"""The kernels that the gate computes with on every machine: others are nightly's."""
MOST_AGAIN = 2
"""Tests of the timing lane that may fail once, and pass in a fresh process, in one run."""
NEVER_AGAIN = re.compile(r"attack|parity|conformance|property|isolation|exact|interference")
"""What never gets a second chance: exactness, isolation, properties and attacks hold every time, or not at all."""


@dataclass
class Lane:
    """How a part of the gate has ended."""

    name: str
    seconds: float
    outcomes: Counter[str]
    failures: dict[str, str] = field(default_factory=dict)
    """What failed, and the command that runs it alone."""
    again: list[str] = field(default_factory=list)
    """Tests that failed, and passed in a fresh process."""


def checks() -> Lane:
    """Run the static checks."""
    began = time.monotonic()
    outcomes = check.run_all()
    failed = {outcome.check.name: outcome.check.shell() for outcome in outcomes if outcome.status}
    counts = Counter({"passed": len(outcomes) - len(failed), "failed": len(failed)})
    return Lane("check", time.monotonic() - began, counts, failed)


def tests(lane: str, *options: str) -> Lane:
    """Run a lane of tests to its end."""
    began = time.monotonic()
    status, rows = run_pytest(lane, "--lane", lane, *options)
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    again = []
    for test in failed.copy() if lane == "timing" else ():
        if not NEVER_AGAIN.search(test) and run_pytest("again", "-n", "0", test)[0] == 0:
            print(f"FAILED, and passed in a fresh process: {test}", flush=True)
            failed.remove(test)
            again.append(test)
    failures = {test: f".venv/bin/python -m pytest -n 0 '{test}'" for test in failed}
    if status not in (0, 1) or (status == 1 and not failed and not again):
        failures[f"the lane itself: pytest ended with {status}"] = f".venv/bin/python -m pytest --lane {lane}"
    if len(again) > MOST_AGAIN:
        failures[f"{len(again)} tests needed a second run, at most {MOST_AGAIN} may"] = f"make repeat TEST='{again[0]}'"
    counts = Counter(row["outcome"] for row in rows)
    counts["failed"], counts["passed"] = len(failures), counts["passed"] + len(again)
    return Lane(lane, time.monotonic() - began, counts, failures, again)


def run_pytest(name: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run pytest with the gate's kernels; its exit status, and a row for each test."""
    report = REPORTS / f"{name}.jsonl"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--report", str(report), *options]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | KERNELS, check=False)
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return ended.returncode, rows


def main() -> int:
    """Run the lanes that are asked for, and print their table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["check", "test", []], help="what to run (default: both)")
    parts = parser.parse_args().parts or ["check", "test"]
    lanes = [checks()] if "check" in parts else []
    if "test" in parts:
        lanes.append(tests("gate", "-n", "2", "--dist", "worksteal"))
        lanes.append(tests("timing", "-n", "0"))
    print(f"\n{'lane':8}{'passed':>8}{'failed':>8}{'skipped':>9}{'again':>7}{'seconds':>9}")
    for lane in lanes:
        passed, failed, skipped = (lane.outcomes[each] for each in ("passed", "failed", "skipped"))
        print(f"{lane.name:8}{passed:8}{failed:8}{skipped:9}{len(lane.again):7}{lane.seconds:9.0f}")
    failures = [each for lane in lanes for each in lane.failures.items()]
    for lane in lanes:
        for test in lane.again:
            print(f"AGAIN   {test}")
    for name, command in failures:
        print(f"FAILED  {name}\n        {command}")
    total = sum((lane.outcomes for lane in lanes), Counter[str]())
    print(f"\n{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
