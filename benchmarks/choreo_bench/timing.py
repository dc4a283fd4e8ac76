"""Shared parts of timed benchmarks: models by name, settings that decide times, medians, and bars to meet."""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.models.embedded import WEIGHTS
from choreo_agents.models.random_llama import SHAPES, save_random_llama
from choreo_agents.models.weights.dtypes import SHORT, dtype_named
from choreo_agents.terminal.loading import Loading
from choreo_agents.terminal.options import waiting

REST_S = 0.2


def rest() -> None:
    """Wait between two runs: the threads of the one before may spin for a while."""
    time.sleep(REST_S)


@contextmanager
def timed_model(
    console: Console, name: str, loading: Loading, longest: int, shorter: str
) -> Iterator[tuple[LoadedModel, Path]]:
    """Load a model, random weights drawn anew with a context that is long enough, and say where a competitor finds it.

    Args:
        console: Says that it is being loaded.
        name: `embedded`, one of `SHAPES`, or a checkpoint.
        loading: How; random weights are drawn in bf16 unless it says otherwise.
        longest: Tokens that are read at once.
        shorter: What to give instead if the context has no room for so many.

    Raises:
        InvalidRequestError: It has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        with waiting(console, f"loading [b]{escape(name)}[/b] ..."):
            path = WEIGHTS if name == "embedded" else Path(name)
            if name in SHAPES:
                path = Path(folder) / name
                drawn = dtype_named(loading.dtype) or torch.bfloat16
                save_random_llama(SHAPES[name], path, positions=max(1 << 15, 2 * longest), dtype=drawn)
            loaded = loading.model(path if name in SHAPES else name)
        if longest > loaded.adapter.max_positions:
            raise InvalidRequestError(
                f"{longest} tokens are read at once, but the context of {name!r} is {loaded.adapter.max_positions}: "
                f"use {shorter}"
            )
        yield loaded, path


def settings_of(name: str, model: LoadedModel, **more: Any) -> dict[str, Any]:
    """Collect what decides the times of a model, as plain JSON: for a journal and for a report."""
    device = model.adapter.device
    return {
        "model": name,
        "weights": model.adapter.fingerprint if name not in SHAPES else "random",
        "dtype": next(name for name, dtype in SHORT.items() if model.adapter.geometry.dtype == dtype),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **more,
        "made_by": made_by(),
    }


def made_by(*others: str) -> str:
    """Say what makes figures: the commit of this checkout, versions, and the processor.

    Args:
        others: Distributions whose versions matter, too, if they are installed.
    """
    texts = [_commit()]
    for name in ("torch", "transformers", "langgraph", *others):
        with suppress(PackageNotFoundError):
            texts.append(f"{name} {version(name)}")
    return ", ".join([*texts, f"{_processor()} with {torch.backends.cpu.get_cpu_capability()}"])


def _commit() -> str:
    """Name the commit, with a star if files differ from it; the version of an installed distribution has none."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=*", "--exclude=*"]
    try:
        return f"commit {subprocess.run(git, capture_output=True, check=True, text=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        return f"choreo-bench {version('choreo-bench')}"


def _processor() -> str:
    """Name the processor, as Linux does; elsewhere its architecture."""
    with suppress(OSError):
        if named := re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return named[1]
    return platform.machine()


def title_of(settings: Mapping[str, Any]) -> str:
    """Name the model of such settings and what it runs on."""
    threads = f"{settings['threads']} thread{'' if settings['threads'] == 1 else 's'}"
    return f"{settings['model']}, {settings['dtype']}, {settings['device']}, {threads}"


@dataclass(frozen=True)
class Spread:
    """A median, and the least and most beside it."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def words(self, style: str) -> str:
        """Write the median, with the others in brackets where they differ."""
        middle, least, most = (style.format(seconds) for seconds in (self.middle, self.least, self.most))
        return f"{middle} ({least} to {most})" if self.least < self.most else middle


@dataclass(frozen=True)
class Bar:
    """A figure, and what its median has to be."""

    what: str
    wanted: float
    measured: Spread | None
    """None: it was not measured."""
    at_least: bool = False
    style: str = "{:,.2f}x"

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured.middle >= self.wanted if self.at_least else self.measured.middle <= self.wanted

    def __str__(self) -> str:
        wanted = f"{self.what}, at {'least' if self.at_least else 'most'} {self.style.format(self.wanted)}"
        if self.measured is None:
            return f"not measured: {wanted}"
        return f"{'met' if self.met else 'missed'}: {wanted}: {self.measured.words(self.style)}"
