"""Launches the kernel that draws tokens, and decides between two tokens whose scores are too close for it.

The kernel for GPUs, in Triton, is in triton_kernel.py; the one for CPUs is native/draw.c.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy
import torch
from torch import Tensor

from choreo_agents.errors import error_text
from choreo_agents.sampling.draw import HIGHEST, LOW, Draw
from choreo_agents.sampling.noise import gumbel

WARPS = 16
_DRAW_COLUMNS, _RESULT_COLUMNS = 9, 6
_SURE, _NEAR = 0, 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONSTANTS = {
    "BLOCK": 4096,
    "ASKED": _DRAW_COLUMNS,
    "TOLD": _RESULT_COLUMNS,
    # Between scores, in exponents of 2: fp32 loses less than a thirtieth of it (winners are above -70).
    "MARGIN": 1e-3,
    # Relative, of sums of weights: fp32 loses less than a twentieth of it, summed in lanes.
    "LOST": 1e-4,
    # Of weights, relative and absolute; those of `draw_token` differ by less than a thirtieth of them.
    "ALIKE": 1e-5,
    "LEAST": 2.0**-30,
    "LOWEST": LOW,
    "HIGHEST": HIGHEST,
}
"""Constants that are compiled into the kernel."""
_log = logging.getLogger(__name__)


class DrawnTokens:
    """Results of a kernel launch, which may still be under way.

    Args:
        results: [draws, columns], int32, on the device.
        draws: Sampling settings of the rows.
    """

    def __init__(self, results: Tensor, draws: Sequence[Draw]) -> None:
        self._draws = draws
        self.guesses = results[:, 0]
        """Token of each row, on the device, int32: nearly always the one that is drawn."""
        self._over: torch.cuda.Event | None = None
        self._host = results
        if results.device.type == "cuda":
            self._host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            self._host.copy_(results, non_blocking=True)
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._over.record()

    @cached_property
    def _results(self) -> list[list[int]]:
        """Results on the host. Waits for the kernel, but for nothing that was launched after it."""
        if self._over is not None:
            self._over.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows

    def guessed(self) -> list[int]:
        """Return the guesses, on the host."""
        return [row[0] for row in self._results]

    def tokens(self) -> list[int | None]:
        """Return the token of each row, or None where the kernel cannot decide."""
        return [self._decide(draw, *row) for draw, row in zip(self._draws, self._results, strict=True)]

    def _decide(self, draw: Draw, first: int, second: int, kind: int, *logits: int) -> int | None:
        if kind == _SURE:
            return first
        if kind != _NEAR:
            return None
        logit1, logit2, top = (float(value) for value in numpy.array(logits, dtype=numpy.int32).view(numpy.float32))
        temperature = draw.sampling.temperature
        scores = [
            ((logit - top) / temperature + gumbel(word, draw.noise), -word)
            for word, logit in ((first, logit1), (second, logit2))
        ]
        return -max(scores)[1]


Launch = Callable[[Tensor, Tensor, Tensor], None]
"""Function of [rows, vocabulary] logits, settings and results, both int32, [draws, columns]; fills the results."""


class DrawKernel:
    """Kernel that draws the tokens of a step in one launch, for all rows that fp32 decides with certainty.

    Args:
        launch: Launches the kernel.
        dtypes: Types of logits that it takes.
    """

    def __init__(self, launch: Launch, dtypes: Collection[torch.dtype] = _DTYPES) -> None:
        self._launch, self._dtypes = launch, dtypes
        self.failure = ""

    def takes(self, logits: Tensor) -> bool:
        """Return whether it can read these logits in place."""
        return logits.stride(1) == 1 and logits.dtype in self._dtypes

    @staticmethod
    def on(device: torch.device) -> DrawKernel | None:
        """Return the kernel of a device, or None; on a CPU, only under `TRITON_INTERPRET=1`."""
        if find_spec("triton") is None:
            return None
        from triton.runtime import JITFunction  # noqa: PLC0415 - an extra

        from choreo_agents.sampling import triton_kernel  # noqa: PLC0415 - an extra

        is_compiled = isinstance(triton_kernel.draw_kernel, JITFunction)
        return DrawKernel(_launch_kernel) if is_compiled == (device.type == "cuda") else None

    def draw(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> DrawnTokens | None:
        """Start to draw tokens for rows of [rows, vocabulary] logits, without waiting; return None if impossible."""
        if self.failure or not rows or not self.takes(logits):
            return None
        results = torch.empty(len(rows), _RESULT_COLUMNS, dtype=torch.int32, device=logits.device)
        columns = _send(_pack_draws(rows, draws, logits.shape[1]), logits.device)
        try:
            self._launch(logits, columns, results)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler says
            self.failure = error_text(error)
            _log.warning("sampling falls back to torch's operators: %s", self.failure)
            return None
        return DrawnTokens(results, draws)


def _launch_kernel(logits: Tensor, columns: Tensor, results: Tensor) -> None:
    """Launch the Triton kernel."""
    from choreo_agents.sampling import triton_kernel  # noqa: PLC0415 - an extra

    triton_kernel.draw_kernel[(len(columns),)](
        logits, columns, results, logits.stride(0), logits.shape[1], **CONSTANTS, num_warps=WARPS
    )


def _pack_draws(rows: Sequence[int], draws: Sequence[Draw], vocabulary: int) -> Any:
    """Pack the settings of draws for the kernel: int32, [draws, columns]."""
    columns = numpy.zeros((len(rows), _DRAW_COLUMNS), dtype=numpy.int32)
    floats = columns.view(numpy.float32)
    columns[:, 0] = rows
    for place, draw in enumerate(draws):
        sampling = draw.sampling
        if sampling.temperature == 0.0:
            continue
        columns[place, 1] = sampling.top_k if sampling.top_k < vocabulary else 0
        floats[place, 2:5] = draw.numbers()
        columns[place, 5:9] = draw.noise
    return columns


def _send(columns: Any, device: torch.device) -> Tensor:
    host = torch.from_numpy(columns)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
