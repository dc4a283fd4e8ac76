"""Keys and values of a message outside the pool, in host memory."""

from __future__ import annotations

import torch
from torch import Tensor


class HostKV:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host.

    Args:
        keys: The keys; `values` likewise.
        copied: Event after which they are filled, if a copy from a device is under way: the first access waits for it.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, copied: torch.cuda.Event | None = None) -> None:
        self._keys, self._values = keys, values
        self._copied = copied

    def __reduce__(self) -> tuple[type[HostKV], tuple[Tensor, Tensor]]:
        return HostKV, (self.keys, self.values)  # waits for the copy: an event cannot be pickled

    @property
    def keys(self) -> Tensor:
        self._wait()
        return self._keys

    @property
    def values(self) -> Tensor:
        self._wait()
        return self._values

    def _wait(self) -> None:
        if (copied := self._copied) is not None:  # read once: another thread may clear it meanwhile
            copied.synchronize()
            self._copied = None

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {"keys": self.keys, "values": self.values}
