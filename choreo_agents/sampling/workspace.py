"""Memory that every block of rows uses again: a page that is new costs more than what is written to it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from choreo_agents.sampling.likeliest import CHUNK

Buffer = Literal[
    "logits",
    "exponents",
    "weights",
    "bounds",
    "floats",
    "spare",
    "bits",
    "spare_bits",
    "exact",
    "strands",
    "places",
    "found",
]
_TYPES: dict[Buffer, torch.dtype] = {
    "logits": torch.float32,
    "exponents": torch.float32,
    "weights": torch.float32,
    "bounds": torch.float32,
    "floats": torch.float32,
    "bits": torch.int32,
    "spare_bits": torch.int32,
    "exact": torch.float64,
    "spare": torch.float32,
    "strands": torch.float32,
    "places": torch.int64,
    "found": torch.float32,
}
_BLOCK_WORDS = {"cpu": 1 << 18}
"""Words of a block by type of device: on a processor what is computed of a row stays in its cache."""
_USUAL_BLOCK_WORDS = 1 << 22


class Workspace:
    """Buffers for blocks of rows of one vocabulary, on one device."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.width = -(-vocabulary // CHUNK) * CHUNK
        """Words of a row, with those that fill its last chunk."""
        self.rows = self.rows_of(self.width)
        """Of a block of whole rows."""
        self.ids = torch.arange(self.width, dtype=torch.int32, device=device)
        self._buffers: dict[Buffer, Tensor] = {}

    def rows_of(self, words: int) -> int:
        """Rows of a block, if so many words of each are looked at."""
        return max(1, _BLOCK_WORDS.get(self.device.type, _USUAL_BLOCK_WORDS) // words)

    def like(self, name: Buffer, shaped: Tensor) -> Tensor:
        """A buffer as what has the shape of [rows, words]; what it held is lost."""
        return self.room(name, *shaped.shape)

    def room(self, name: Buffer, rows: int, words: int) -> Tensor:
        """A buffer as [rows, words]; what it held is lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * words:
            self._buffers[name] = buffer = torch.empty(rows * words, dtype=_TYPES[name], device=self.device)
        return buffer[: rows * words].view(rows, words)
