"""Rows of a table that are written down as they come, and stages that fail alone."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Table:
    """Rows of stage, name, value and bar, in a file of JSON lines.

    Args:
        path: The file; what it held is lost.
        device: That is measured.
        seconds: After which nothing new begins, and what exactness is shown by is given up.
    """

    def __init__(self, path: Path, device: torch.device, seconds: float = 480.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self.path, self.device = path, device
        self.rows: list[dict[str, Any]] = []
        self.is_dry = device.type == "cpu"
        self.has_bars = not self.is_dry
        """Whether times have bars: those of what `auto` takes, and none of a dry run."""
        self._stage, self._begun, self._seconds = "", time.monotonic(), seconds

    def row(self, name: str, value: Any, *, bar: str = "", met: bool | None = None) -> None:
        """Write a row down; one that has a bar says whether it is met, and one that is not met fails the run."""
        made = {"stage": self._stage, "name": name, "value": value} | ({} if met is None else {"bar": bar, "met": met})
        self.rows.append(made)
        with self.path.open("a") as file:
            file.write(json.dumps(made) + "\n")
        print(
            f"[{time.monotonic() - self._begun:5.0f} s] {self._stage:12} {name}: {value} {bar and f'({bar})'}",
            flush=True,
        )

    def stage(self, name: str, run: Callable[[Table], None]) -> None:
        """Run a stage; what it raises is a row, and the next one is run all the same."""
        self._stage = name
        if self.is_over("all"):
            return
        try:
            run(self)
        except Exception:  # whatever a kernel raises
            self.row("failed", traceback.format_exc()[-2000:], bar="no failure", met=False)

    @property
    def seconds_left(self) -> float:
        """Until its time is over."""
        return max(0.0, self._begun + self._seconds - time.monotonic())

    def is_over(self, left_out: str) -> bool:
        """Whether its time is; if so a row says what is therefore left out."""
        if not self.seconds_left:
            self.row("left out", f"{left_out}: {self._seconds:.0f} s are over", bar="nothing", met=False)
        return not self.seconds_left

    def bar(self, met: bool, bar: str) -> dict[str, Any]:
        """Of a time, for its row."""
        return {"bar": bar, "met": met} if self.has_bars else {}

    @property
    def missed(self) -> list[dict[str, Any]]:
        """Rows whose bar is not met."""
        return [row for row in self.rows if row.get("met") is False]

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], Any], times: int = 20) -> float:
        """The median of several runs, on the device's own clock where it has one."""
        for _ in range(2):
            run()
        self.wait()
        taken = sorted(self._timed(run) for _ in range(times))
        return taken[times // 2]

    def _timed(self, run: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            begun = time.perf_counter()
            run()
            return (time.perf_counter() - begun) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))
