"""Runs tests as on other machines: with the kernels that torch and oneDNN choose there, and with two threads.

One test in eight of those that are exact, about 120, chosen by its name: with this processor's own kernels all of them
are run by the row `parity` of `make nightly`, and with AVX2 by `make test`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from zlib import crc32

from choreo_agents.native.library import available_kernels

SUITES = ("tests/parity", "tests/conformance")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
# oneDNN is held back wherever torch is: torch does not expect wider vectors of it than its own.
KERNELS: Mapping[str, tuple[Mapping[str, str], int]] = {
    "no vectors in torch, AVX2 in oneDNN": (AVX2 | {"ATEN_CPU_CAPABILITY": "default"}, 1),
    "AVX2 in torch and oneDNN": (AVX2 | {"ATEN_CPU_CAPABILITY": "avx2"}, 1),
    "AVX2 in oneDNN": (AVX2, 1),
    "no tiles": ({"CHOREO_AGENTS_KERNELS": "AVX512_BF16"}, 1),
    "no products of bfloat16s": ({"CHOREO_AGENTS_KERNELS": "AVX512"}, 1),
    "two threads": ({"OMP_WAIT_POLICY": "passive"}, 2),  # workers share cores: none may wait by spinning
}
"""Environment and threads by name."""
ONE_IN = 8
AVAILABLE = available_kernels()
AS_IT_IS = {} if isinstance(AVAILABLE, str) else {"CHOREO_AGENTS_KERNELS": AVAILABLE[0].name}
"""The limit that changes nothing on this processor."""
CHOSEN = "import torch; print(torch.backends.cpu.get_cpu_capability(), 'in torch')"


def main(options: list[str]) -> int:
    """Runs all of them, whatever fails; `options` are pytest's."""
    outcomes: list[tuple[str, int, float]] = []
    for name, (changes, threads) in KERNELS.items():
        if changes == AS_IT_IS:
            continue
        environment = os.environ | changes
        chosen = subprocess.run(
            [sys.executable, "-c", CHOSEN], env=environment, capture_output=True, text=True, check=True
        )
        # Which there are depends on the kernels: a backend that needs vectors has no tests without them.
        collect = [sys.executable, "-m", "pytest", "--collect-only", *SUITES]
        collected = subprocess.run(collect, env=environment, capture_output=True, text=True, check=True).stdout
        tests = [line for line in collected.splitlines() if "::" in line and not crc32(line.encode()) % ONE_IN]
        say(f"== {name}: {chosen.stdout.strip()}, {threads} threads, {len(tests)} tests")
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", f"--threads={threads}", *options, *tests]
        outcomes.append(
            (name, subprocess.run(command, env=environment, check=False).returncode, time.monotonic() - start)
        )
    say("")
    for name, code, seconds in outcomes:
        say(f"{'FAILED' if code else 'passed'} in {seconds:4.0f} s: {name}")
    return int(any(code for _, code, _ in outcomes))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
