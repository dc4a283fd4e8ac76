"""What a model takes of a device, told from its configuration and from what its files say about themselves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.kv.free_memory import free_bytes
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models.adapter import max_positions
from choreo_agents.models.weights.dtypes import require_served, usual_dtype
from choreo_agents.models.weights.quantized import is_dense, method_of, quantization_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from choreo_agents.models.checkpoint import Checkpoint

_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Numbers that are converted where the model's dtype is another; all others stay as they are."""
_ROOM = 1.1
"""How much more than its weights loading takes at its peak."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes, on the device that was asked for."""

    weights: int
    measured: bool
    """Whether the files of the weights said so; else the configuration did."""
    kv_per_token: int
    context: int
    """Tokens."""
    free: int
    """Now, on that device."""

    @property
    def kv_of_context(self) -> int:
        """Of one conversation as long as the context."""
        return self.kv_per_token * self.context

    @property
    def holds_weights(self) -> bool:
        """Whether they fit what is free, with what loading takes besides."""
        return self.weights * _ROOM <= self.free

    @property
    def holds_context(self) -> bool:
        """Whether one whole context fits beside them."""
        return self.weights + self.kv_of_context <= self.free


@dataclass(frozen=True)
class DtypeChoice:
    """In which numbers a model is served."""

    own: torch.dtype
    """The checkpoint's."""
    served: torch.dtype
    why: str
    quantised: str | None
    """The method; None: they are not."""


def dtype_of(config: PreTrainedConfig, stored: StoredWeights | None, device: torch.device, asked: Any) -> DtypeChoice:
    """The dtype of weights and KV.

    Args:
        config: The model's.
        stored: What its files say; None without weights.
        device: Where it is to run.
        asked: The dtype that was asked for; None: the usual one.

    Raises:
        UnsupportedModelError: No device computes in it.
    """
    quantization = quantization_of(config)
    method = None if quantization is None else method_of(quantization)
    said = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    own = said if isinstance(said, torch.dtype) else (stored.dtype if stored is not None else None) or torch.float32
    if asked is not None:
        return DtypeChoice(own, asked, "asked for", method)
    require_served(own)
    served = own if method is not None else usual_dtype(own, device)
    why = "the checkpoint's own" if served == own else f"{device.type} has no kernels for the checkpoint's own"
    return DtypeChoice(own, served, why, method)


@dataclass(frozen=True)
class StoredWeights:
    """What the headers of safetensors files say."""

    numbers: Mapping[str, int]
    """How many there are, by the name that safetensors has for their dtype."""
    bytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        """That of most of them; None if none is a floating-point number."""
        counts = {count: _STORED[name] for name, count in self.numbers.items() if name in _STORED}
        return counts[max(counts)] if counts else None

    def served_bytes(self, served: torch.dtype) -> int:
        """What they take in another dtype."""
        stored = sum(count * _STORED[name].itemsize for name, count in self.numbers.items() if name in _STORED)
        return self.bytes - stored + served.itemsize * sum(self.numbers.get(name, 0) for name in _STORED)

    @classmethod
    def read(cls, folder: Path) -> StoredWeights | None:
        """Those of a folder; None if it has none, or only a part of them.

        Raises:
            OSError: They are damaged.
        """
        files = _weight_files(folder)
        if not files or not all(file.exists() for file in files):
            return None
        numbers: Counter[str] = Counter()
        size = 0
        for file in files:
            for dtype, count, taken in _tensors(file):
                numbers[dtype] += count
                size += taken
        return cls(numbers, size)


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers reads: others may lie beside them, such as the same weights in a maker's own format."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    try:
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{str(index)!r} is damaged: it does not say which weights are where") from error


def _tensors(file: Path) -> list[tuple[str, int, int]]:
    """Of each the dtype, how many numbers, and bytes."""
    try:
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        return [
            (str(tensor["dtype"]), prod(tensor["shape"]), tensor["data_offsets"][1] - tensor["data_offsets"][0])
            for tensor in tensors
        ]
    except (ValueError, LookupError, TypeError, AttributeError, MemoryError, OverflowError, RecursionError) as error:
        raise OSError(f"{str(file)!r} is damaged: its header cannot be read") from error


def needs_of(
    checkpoint: Checkpoint, stored: StoredWeights | None, dtype: torch.dtype, device: torch.device
) -> MemoryNeeds:
    """What a model takes of a device; where its files do not tell, it is built without memory, to be counted."""
    text = checkpoint.config.get_text_config()
    told = None if is_dense(quantization_of(checkpoint.config), device) else stored
    weights = checkpoint.parameters() * dtype.itemsize if told is None else told.served_bytes(dtype)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    geometry = KVGeometry(text.num_hidden_layers, kv_heads, _head_size(text), dtype)
    return MemoryNeeds(weights, stored is not None, geometry.bytes_per_token, max_positions(text), free_bytes(device))


def _head_size(text: PreTrainedConfig) -> int:
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not isinstance(size, int):
        raise UnsupportedModelError(f"model type {text.model_type!r} says nothing of the size of its heads")
    return size
