"""Asks the kernel for winners, and decides between two that are too near each other for it."""

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
from choreo_agents.sampling.draw import Draw, numbers
from choreo_agents.sampling.noise import gumbel
from choreo_agents.sampling.rows import HIGHEST, LOW

_BLOCK, WARPS = 4096, 16
_ASKED, _TOLD = 9, 6
_MARGIN = 1e-3
"""In exponents of 2, between scores: fp32 loses less than a thirtieth of it (those that may win are above -70)."""
_LOST = 1e-4
"""Relative, of a sum of weights: fp32 loses less than a twentieth of it, summed in lanes."""
_ALIKE, _LEAST = 1e-5, 2.0**-30
"""See `contest`, whose weights differ from these by less than a thirtieth of it."""
_SURE, _NEAR = 0, 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONSTANTS = {
    "BLOCK": _BLOCK,
    "ASKED": _ASKED,
    "TOLD": _TOLD,
    "MARGIN": _MARGIN,
    "LOST": _LOST,
    "ALIKE": _ALIKE,
    "LEAST": _LEAST,
    "LOWEST": LOW,
    "HIGHEST": HIGHEST,
}
"""That are compiled in."""
_log = logging.getLogger(__name__)


class Tickets:
    """What was asked of the kernel, and is under way.

    Args:
        told: [draws, columns], int32, on the device.
        draws: By which row asks for what.
    """

    def __init__(self, told: Tensor, draws: Sequence[Draw]) -> None:
        self._draws = draws
        self.guesses = told[:, 0]
        """The word of each row: on the device, int32, and all but always the one that is drawn."""
        self._over: torch.cuda.Event | None = None
        self._host = told
        if told.device.type == "cuda":
            self._host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._host.copy_(told, non_blocking=True)
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._over.record()

    @cached_property
    def _told(self) -> list[list[int]]:
        """Waits for the kernel, and for nothing that was begun after it."""
        if self._over is not None:
            self._over.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows

    def guessed(self) -> list[int]:
        """The guesses, on the host."""
        return [row[0] for row in self._told]

    def tokens(self) -> list[int | None]:
        """The word of each row, or None where the kernel cannot tell."""
        return [self._decided(draw, *row) for draw, row in zip(self._draws, self._told, strict=True)]

    def _decided(self, draw: Draw, first: int, second: int, kind: int, *logits: int) -> int | None:
        if kind == _SURE:
            return first
        if kind != _NEAR:
            return None
        one, other, top = (float(each) for each in numpy.array(logits, dtype=numpy.int32).view(numpy.float32))
        temperature = draw.sampling.temperature
        scores = [
            ((logit - top) / temperature + gumbel(word, draw.noise), -word)
            for word, logit in ((first, one), (second, other))
        ]
        return -max(scores)[1]


Launch = Callable[[Tensor, Tensor, Tensor], None]
"""Takes [rows, vocabulary] logits and what is asked of each draw, int32, [draws, columns]; fills what is told of it."""


class Lottery:
    """Draws tokens in one launch, for one device.

    Args:
        launch: Has them drawn.
        dtypes: Of logits that it takes.
    """

    def __init__(self, launch: Launch, dtypes: Collection[torch.dtype] = _DTYPES) -> None:
        self._launch, self._dtypes = launch, dtypes
        self._why = ""

    @staticmethod
    def on(device: torch.device) -> Lottery | None:
        """That of a device; None if it has none: on a processor it is interpreted, if anybody says so."""
        if find_spec("triton") is None:
            return None
        from triton.runtime import JITFunction  # noqa: PLC0415 - an extra

        from choreo_agents.sampling.lottery import kernels  # noqa: PLC0415 - an extra

        is_compiled = isinstance(kernels.draw_kernel, JITFunction)
        return Lottery(_launched) if is_compiled == (device.type == "cuda") else None

    def draw(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tickets | None:
        """Have the tokens of these rows of [rows, vocabulary] logits drawn, without waiting; None if it cannot be."""
        if self._why or not rows or logits.stride(1) != 1 or logits.dtype not in self._dtypes:
            return None
        told_ = torch.empty(len(rows), _TOLD, dtype=torch.int32, device=logits.device)
        asked = _sent(_asked(rows, draws, logits.shape[1]), logits.device)
        try:
            self._launch(logits, asked, told_)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler says
            self._why = error_text(error)
            _log.warning("tokens are drawn by torch's operators: %s", self._why)
            return None
        return Tickets(told_, draws)


def _launched(logits: Tensor, asked: Tensor, told_: Tensor) -> None:
    """By the kernel in Triton."""
    from choreo_agents.sampling.lottery import kernels  # noqa: PLC0415 - an extra

    kernels.draw_kernel[(len(asked),)](
        logits, asked, told_, logits.stride(0), logits.shape[1], **CONSTANTS, num_warps=WARPS
    )


def _asked(rows: Sequence[int], draws: Sequence[Draw], vocabulary: int) -> Any:
    """What the kernel is told of each draw: int32, [draws, columns]."""
    made = numpy.zeros((len(rows), _ASKED), dtype=numpy.int32)
    floats = made.view(numpy.float32)
    made[:, 0] = rows
    for place, draw in enumerate(draws):
        wanted = draw.sampling
        if wanted.temperature == 0.0:
            continue
        made[place, 1] = wanted.top_k if wanted.top_k < vocabulary else 0
        floats[place, 2:5] = numbers(wanted)
        made[place, 5:9] = draw.noise
    return made


def _sent(made: Any, device: torch.device) -> Tensor:
    host = torch.from_numpy(made)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
