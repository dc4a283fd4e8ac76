"""Keys and values outside of the pool, and the host memory in which they wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.quantization import dequantize, quantize

Stored = Literal["full", "int8", "low-rank"]
"""How KV is kept below the pool: as it is; in whole numbers of eight bits, exact for what was rounded to them before;
or not at all, because what it was made of is there, and a low-rank correction makes it again."""
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class HostKV:
    """Keys and values of one message, [layers, kv_heads, tokens, head_dim] each, on the host."""

    keys: Tensor
    values: Tensor
    exponents: Tensor | None = None
    """Of keys and values that are whole numbers (see `quantization`), [2, layers, kv_heads, tokens]."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All that there is, by name."""
        named = {"keys": self.keys, "values": self.values}
        return named if self.exponents is None else named | {"exponents": self.exponents}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()}

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


class HostTier(Generic[Key]):
    """KV in host memory, the least recently used ones leaving when a budget is reached.

    Not thread-safe.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._kept: OrderedDict[Key, HostKV] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def bytes_of(self, key: Key) -> int:
        """What it takes here."""
        return self._kept[key].nbytes if key in self._kept else 0

    def put(self, key: Key, kv: HostKV) -> list[tuple[Key, HostKV]]:
        """Keep KV; what leaves for it, oldest first: itself if it is larger than the budget."""
        assert key not in self._kept
        self._kept[key] = kv
        self.used_bytes += kv.nbytes
        left: list[tuple[Key, HostKV]] = []
        while self.used_bytes > self.budget_bytes:
            oldest, leaving = self._kept.popitem(last=False)
            self.used_bytes -= leaving.nbytes
            left.append((oldest, leaving))
        return left

    def take(self, key: Key) -> HostKV | None:
        """Hand KV out and forget it."""
        kv = self._kept.pop(key, None)
        if kv is not None:
            self.used_bytes -= kv.nbytes
        return kv

    def check(self) -> None:
        """Assert that the budget is kept and counted."""
        assert self.used_bytes == sum(kv.nbytes for kv in self._kept.values()) <= self.budget_bytes
