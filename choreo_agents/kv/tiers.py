"""Keys and values outside of the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from choreo_agents.kv.geometry import KVGeometry


class HostKV:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host.

    Args:
        keys: Its keys, and `values` its values.
        coming: Happens when they are written, beside a device's steps: whoever looks at them first waits for that.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, coming: torch.cuda.Event | None = None) -> None:
        self._keys, self._values = keys, values
        self._coming = coming

    def __reduce__(self) -> tuple[type[HostKV], tuple[Tensor, Tensor]]:
        return HostKV, (self.keys, self.values)

    @property
    def keys(self) -> Tensor:
        self._wait()
        return self._keys

    @property
    def values(self) -> Tensor:
        self._wait()
        return self._values

    def _wait(self) -> None:
        if (coming := self._coming) is not None:  # who else waits meanwhile waits for the same
            coming.synchronize()
            self._coming = None

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """All that there is, by name."""
        return {"keys": self.keys, "values": self.values}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each."""
        both = {"keys": self._keys, "values": self._values}  # whose shapes are known before they are there
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in both.items()}


def shapes_of(geometry: KVGeometry, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `HostKV.shapes` says of a message of so many tokens."""
    each = ((geometry.layers, geometry.kv_heads, tokens, geometry.head_dim), geometry.dtype)
    return {"keys": each, "values": each}
