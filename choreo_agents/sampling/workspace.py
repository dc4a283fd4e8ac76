"""Buffers that are reused for every block of rows: a new page costs more than writing to it."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.sampling.likeliest import CHUNK

_TYPES = {"bits": torch.int32, "spare_bits": torch.int32, "exact": torch.float64, "places": torch.int64}
"""Types of buffers that are not fp32."""
_BLOCK_WORDS = {"cpu": 1 << 18}
"""Logits in a block, by type of device: on a CPU, a block fits into the cache."""
_USUAL_BLOCK_WORDS = 1 << 22


class Workspace:
    """Buffers for blocks of rows of one vocabulary, on one device."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.width = -(-vocabulary // CHUNK) * CHUNK
        """Length of a row: the vocabulary, padded to whole chunks."""
        self.rows = self.rows_of(self.width)
        """Rows of a block of whole rows."""
        self.ids = torch.arange(self.width, dtype=torch.int32, device=device)
        self._buffers: dict[str, Tensor] = {}

    def rows_of(self, words: int) -> int:
        """Return the rows of a block if `words` logits of each are read."""
        return max(1, _BLOCK_WORDS.get(self.device.type, _USUAL_BLOCK_WORDS) // words)

    def like(self, name: str, shaped: Tensor) -> Tensor:
        """Return a buffer of the shape of `shaped`, [rows, words]; its contents are lost."""
        return self.buffer(name, *shaped.shape)

    def buffer(self, name: str, rows: int, words: int) -> Tensor:
        """Return a buffer as [rows, words]; its contents are lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * words:
            self._buffers[name] = buffer = torch.empty(
                rows * words, dtype=_TYPES.get(name, torch.float32), device=self.device
            )
        return buffer[: rows * words].view(rows, words)
