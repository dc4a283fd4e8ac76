"""Index tables of a step, sent from the host to a device as one buffer, in one copy, without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Alignment of each array, in bytes."""


class SentTables:
    """Arrays side by side in one int32 buffer on the host, and views of its copy on a device.

        buffer    | slots . . | tiles . . . . | pairs . . . . . . | angles . . . |     each at a multiple of 16 bytes

    `host[name]` may be written to; `send` copies the buffer again, in the order of the device's work. Each copy has
    pinned memory of its own: one that is still under way does not see what is written for the next.

    Args:
        arrays: By name; of a type of 4 or 8 bytes.
        device: Holds the copy.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> None:
        at = 0
        places: dict[str, tuple[int, int]] = {}
        for name, array in arrays.items():
            places[name] = at, at + array.nbytes
            at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = numpy.zeros(at // 4, dtype=numpy.int32)
        self._buffer = torch.from_numpy(buffer)
        self._copy = torch.empty(len(buffer), dtype=torch.int32, device=device)
        self.host: dict[str, NDArray[Any]] = {}
        self._views: dict[str, Tensor] = {}
        for name, array in arrays.items():
            first, end = (place // 4 for place in places[name])
            self.host[name] = buffer[first:end].view(array.dtype).reshape(array.shape)
            self.host[name][...] = array
            self._views[name] = self._copy[first:end].view(torch.from_numpy(self.host[name]).dtype).view(array.shape)
        self.send()

    def __getitem__(self, name: str) -> Tensor:
        """Return an array on the device."""
        return self._views[name]

    @torch.inference_mode()  # a copy that an engine's step made in inference mode may be written to in that mode only
    def send(self) -> None:
        """Copy all arrays from the host to the device."""
        if self._copy.device.type != "cuda":
            self._copy.copy_(self._buffer)
            return
        pinned = torch.empty(self._buffer.shape, dtype=torch.int32, pin_memory=True)
        pinned.copy_(self._buffer)
        self._copy.copy_(pinned, non_blocking=True)
