"""Loads one checkpoint in fresh processes, in turns: as transformers does, and as the engine does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from choreo_agents.errors import ChoreoError
from choreo_agents.terminal.loading import DtypeName

PLAIN, CACHED, NEW, PLAIN_WEIGHTS, CONVERTED = (
    "from_pretrained, three forwards",
    "choreo",
    "choreo, fingerprint unknown",
    "choreo, plain weights",
    "choreo, in fp32",
)
WAYS = (PLAIN, CACHED, NEW, PLAIN_WEIGHTS, CONVERTED)
_CHILD = "choreo_agents.lab.experiments.bench_loading.child"


@dataclass
class LoadingReport:
    """Everything measured, by way: one dictionary for each process."""

    model: str
    threads: int
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def middle(self, way: str, what: str) -> float:
        """The median of what each run found."""
        return median(run[what] for run in self.runs[way])

    def as_object(self) -> dict[str, Any]:
        return {"model": self.model, "threads": self.threads, "runs": self.runs}

    def rows(self) -> list[tuple[str, ...]]:
        """Way, seconds, as a multiple of the plain ones, memory above the imports, as a multiple of the weights'."""
        plain = self.middle(PLAIN, "seconds")
        found: list[tuple[str, ...]] = []
        for way in self.runs:
            seconds, weights, loading = (self.middle(way, what) for what in ("seconds", "weights", "loading"))
            most = loading + (self.middle(way, "decoding") if way != PLAIN else 0)
            decode = "" if way == PLAIN else f"{self.middle(way, 'first_decode'):.2f}"
            found.append(
                (
                    way,
                    f"{seconds:.2f}",
                    f"{seconds / plain:.2f}x",
                    decode,
                    f"{weights / 2**20:,.0f}",
                    f"{loading / weights:.2f}x",
                    "" if way == PLAIN else f"{most / weights:.2f}x",
                )
            )
        return found


COLUMNS = (
    "",
    "s",
    "time / plain",
    "first decode, s",
    "weights, MiB",
    "memory at load / weights",
    "with a decode",
)


def measure_loading(
    path: Path, model: str, *, repeats: int, threads: int, on_progress: Callable[[], None] = lambda: None
) -> LoadingReport:
    """Load a checkpoint in every way, in turns.

    Args:
        path: Its folder.
        model: What it is called.
        repeats: Of every way, after one that fills caches and is not counted.
        threads: Of torch.
        on_progress: Told after each process.
    """
    report = LoadingReport(model, threads, {way: [] for way in WAYS})
    with tempfile.TemporaryDirectory() as known:
        for number in range(repeats + 1):
            for way in WAYS:
                with tempfile.TemporaryDirectory() as unknown:
                    found = _in_a_process(path, way, threads, unknown if way == NEW else known)
                if number:
                    report.runs[way].append(found)
                on_progress()
    return report


def _in_a_process(path: Path, way: str, threads: int, assets: str) -> dict[str, float]:
    dtype: DtypeName = "fp32" if way == CONVERTED else "auto"
    asked = {
        "way": "plain" if way == PLAIN else "choreo",
        "path": str(path),
        "dtype": dtype,
        "threads": threads,
        "prepacked": way != PLAIN_WEIGHTS,
    }
    done = subprocess.run(
        [sys.executable, "-m", _CHILD, json.dumps(asked)],
        env={**os.environ, "HF_ASSETS_CACHE": assets},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChoreoError(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
