"""Run what gates a change: static checks beside the gate's tests on two workers, then the timing lane one by one.

All of it runs, whatever fails; failures are printed when they happen. At the end stand one table, each failure with the
command that runs it alone, and one exit status.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gate import check
from gate.plugin import read_list, reason_in
from gate.process import run_to_end

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "build" / "gate"
KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
"""The kernels that the gate computes with on every machine: others are nightly's."""
MOST_AGAIN = 2
"""Tests of the timing lane that may fail once, and pass in a fresh process, in one run."""
LONGEST_S = 1800.0
"""A lane that takes longer hangs, and is stopped."""


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
    status, rows = run_pytest(lane, "--lane", lane, "--continue-on-collection-errors", *options)
    failed = [row["test"] for row in rows if row["outcome"] == "failed"]
    may_pass_again = read_list("timing", "again") if lane == "timing" else {}
    again = [test for test in failed if reason_in(may_pass_again, test) and passes_again(test)]
    failures = {test: alone(lane, test) for test in failed if test not in again}
    if status not in (0, 1) or not rows or (status == 1 and not failed):
        failures[f"the lane itself: pytest ended with {status}, and {len(rows)} outcomes"] = alone(lane)
    if len(again) > MOST_AGAIN:
        failures[f"{len(again)} tests needed a second run, at most {MOST_AGAIN} may"] = f"make repeat TEST='{again[0]}'"
    counts = Counter(row["outcome"] for row in rows)
    counts["failed"], counts["passed"] = len(failures), counts["passed"] + len(again)
    return Lane(lane, time.monotonic() - began, counts, failures, again)


def passes_again(test: str) -> bool:
    """Run a test that has failed once more, in a fresh process."""
    _, rows = run_pytest("again", "--lane", "timing", "-n", "0", test)
    passes = [row["outcome"] for row in rows] == ["passed"]
    print(f"FAILED, and {'passed' if passes else 'failed again'} in a fresh process: {test}", flush=True)
    return passes


def alone(lane: str, *tests: str) -> str:
    """Say the command that runs a test, or a lane, as the gate does."""
    settings = " ".join(f"{name}={value}" for name, value in KERNELS.items())
    return f"{settings} {shlex.join(['.venv/bin/python', '-m', 'pytest', '--lane', lane, '-n', '0', *tests])}"


def run_pytest(name: str, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run pytest with the gate's kernels; its exit status, and a row for each test."""
    report = REPORTS / f"{name}.jsonl"
    report.unlink(missing_ok=True)
    status = run_to_end([sys.executable, "-m", "pytest", "--report", str(report), *options], ROOT, LONGEST_S, KERNELS)
    return status, [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def main() -> int:
    """Run the lanes that are asked for, and print their table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["check", "test", []], help="what to run (default: both)")
    parts = parser.parse_args().parts or ["check", "test"]
    lanes = []
    with ThreadPoolExecutor(1) as beside:  # type checking takes one core, while the workers of pytest begin
        checking = beside.submit(checks) if "check" in parts else None
        if "test" in parts:
            lanes.append(tests("gate", "-n", "2", "--dist", "worksteal"))
    if checking is not None:
        lanes.insert(0, checking.result())
    if "test" in parts:
        files = sorted({test.partition("::")[0] for test in read_list("timing")})
        lanes.append(tests("timing", "-n", "1", *files))  # a worker: one that crashes does not take the others along
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
