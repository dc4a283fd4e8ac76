"""Memory that every block of rows uses again: a page that is new costs more than what is written to it."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.sampling.likeliest import CHUNK

_TYPES = {"bits": torch.int32, "spare_bits": torch.int32, "exact": torch.float64, "places": torch.int64}
"""Of buffers that hold no fp32 numbers."""
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
        self._buffers: dict[str, Tensor] = {}

    def rows_of(self, words: int) -> int:
        """Rows of a block, if so many words of each are looked at."""
        return max(1, _BLOCK_WORDS.get(self.device.type, _USUAL_BLOCK_WORDS) // words)

    def like(self, name: str, shaped: Tensor) -> Tensor:
        """A buffer as what has the shape of [rows, words]; what it held is lost."""
        return self.room(name, *shaped.shape)

    def room(self, name: str, rows: int, words: int) -> Tensor:
        """A buffer as [rows, words]; what it held is lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * words:
            self._buffers[name] = buffer = torch.empty(
                rows * words, dtype=_TYPES.get(name, torch.float32), device=self.device
            )
        return buffer[: rows * words].view(rows, words)
