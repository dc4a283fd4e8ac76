"""Keys and values outside of the pool."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.kv.geometry import KVGeometry


class Coming(Protocol):
    """A copy that a device makes beside its steps: an event of CUDA's, say."""

    def synchronize(self) -> None:
        """Return when it is made."""
        ...


class HostKV:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host.

    Args:
        keys: Its keys, and `values` its values.
        coming: What still writes keys and values: whoever looks at them first waits for that.
    """

    def __init__(self, keys: Tensor, values: Tensor, *, coming: Coming | None = None) -> None:
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
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All that there is, by name."""
        self._wait()
        return self._tensors()

    def _tensors(self) -> dict[str, Tensor]:
        return {"keys": self._keys, "values": self._values}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors().items()}


def shapes_of(geometry: KVGeometry, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `HostKV.shapes` says of a message of so many tokens."""
    each = ((geometry.layers, geometry.kv_heads, tokens, geometry.head_dim), geometry.dtype)
    return {"keys": each, "values": each}
