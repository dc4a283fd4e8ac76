"""Run one test many times, each in a fresh process, beside two loops that keep the processors busy.

A test with threads, processes or clocks is quoted with what this prints.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gate.run import KERNELS, ROOT

BUSY = (sys.executable, "-c", "while True: pass")


def main() -> int:
    """Repeat the test, and print how often it failed; 1 if ever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("test", help="a test, file or folder, as pytest names it")
    parser.add_argument("times", type=int, nargs="?", default=50, help="how often (default: 50)")
    parser.add_argument("--busy", type=int, default=2, help="busy loops beside it (default: 2)")
    options = parser.parse_args()
    if options.times < 1:
        parser.error("run it once at least")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", options.test]
    failed, began = 0, time.monotonic()
    with ExitStack() as stack:
        for _ in range(options.busy):
            stack.callback(subprocess.Popen(BUSY).kill)
        for number in range(options.times):
            ended = subprocess.run(
                command, cwd=ROOT, env=os.environ | KERNELS, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                failed += 1
                print(f"run {number + 1} failed:\n{ended.stdout}", flush=True)
                if ended.returncode not in (0, 1):
                    break
    print(f"{options.test}: {failed} of {number + 1} failed, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
