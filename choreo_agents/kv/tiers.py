"""Keys and values outside of the pool, and how they are kept there."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.quantization import dequantize, quantize

Stored = Literal["full", "int8", "low-rank"]
"""How KV is kept below the pool: as it is; in whole numbers of eight bits, exact for what was rounded to them before;
or not at all, because what it was made of is there, and a low-rank correction makes it again."""


class Coming(Protocol):
    """A copy that a device makes beside its steps: an event of CUDA's, say."""

    def synchronize(self) -> None:
        """Return when it is made."""
        ...


class HostKV:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host.

    Args:
        keys: Its keys, and `values` its values.
        exponents: Of keys and values that are whole numbers (see `quantization`), [2, layers, kv_heads, tokens].
        coming: What still writes keys and values: whoever looks at them first waits for that.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, exponents: Tensor | None = None, *, coming: Coming | None = None
    ) -> None:
        self._keys, self._values, self.exponents = keys, values, exponents
        self._coming = coming

    def __reduce__(self) -> tuple[type[HostKV], tuple[Tensor, Tensor, Tensor | None]]:
        return HostKV, (self.keys, self.values, self.exponents)

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
        named = {"keys": self._keys, "values": self._values}
        return named if self.exponents is None else named | {"exponents": self.exponents}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors().items()}

    def quantized(self) -> HostKV:
        """The same in whole numbers of eight bits; exact for what was rounded to them before."""
        (keys, of_keys), (values, of_values) = quantize(self.keys), quantize(self.values)
        return HostKV(keys, values, torch.stack([of_keys, of_values]))

    def dequantized(self, dtype: torch.dtype) -> HostKV:
        """As the pool has them."""
        if self.exponents is None:
            return self
        of_keys, of_values = self.exponents
        return HostKV(dequantize(self.keys, of_keys, dtype), dequantize(self.values, of_values, dtype))


def stored_bytes(geometry: KVGeometry, stored: Stored) -> int:
    """What a token takes below the pool."""
    heads = 2 * geometry.layers * geometry.kv_heads
    return {"full": geometry.bytes_per_token, "int8": heads * (geometry.head_dim + 1), "low-rank": 0}[stored]


def shapes_of(geometry: KVGeometry, tokens: int, *, quantized: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `HostKV.shapes` says of a message of so many tokens."""
    heads = (geometry.layers, geometry.kv_heads, tokens)
    each = ((*heads, geometry.head_dim), torch.int8 if quantized else geometry.dtype)
    named: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"keys": each, "values": each}
    return named | {"exponents": ((2, *heads), torch.int8)} if quantized else named
