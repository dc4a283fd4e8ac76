"""Estimates the memory that a model needs, from its configuration and its weight files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from choreo_agents.errors import UnsupportedModelError
from choreo_agents.kv.free_memory import free_bytes
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models.adapter import max_positions
from choreo_agents.models.weights.dtypes import require_served, usual_dtype
from choreo_agents.models.weights.quantized import is_dense, method_of, quantization_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from choreo_agents.models.checkpoint import Checkpoint

_CONVERTED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
"""Dtypes that are converted to the served dtype; all others stay as they are."""
_LOADING_PEAK = 1.1
"""Peak memory of loading, as a multiple of the weights."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory that a model needs on a device, in bytes."""

    weights: int
    measured: bool
    """Whether the size of the weights comes from their files; if not, from the configuration."""
    kv_per_token: int
    context: int
    """Context length in tokens."""
    free: int
    """Memory that is free on the device now."""

    @property
    def kv_of_context(self) -> int:
        """KV of one conversation as long as the context."""
        return self.kv_per_token * self.context

    @property
    def holds_weights(self) -> bool:
        """True if the weights fit the free memory, with the peak of loading."""
        return self.weights * _LOADING_PEAK <= self.free

    @property
    def holds_context(self) -> bool:
        """True if the weights and the KV of one whole context fit the free memory."""
        return self.weights + self.kv_of_context <= self.free


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that a model is served in, with the reason."""

    own: torch.dtype
    """The checkpoint's dtype."""
    served: torch.dtype
    why: str
    quantised: str | None
    """Quantisation method of the weights; None: they are not quantised."""


def dtype_of(config: PreTrainedConfig, stored: StoredWeights | None, device: torch.device, dtype: Any) -> DtypeChoice:
    """Choose the dtype of weights and KV.

    Args:
        config: The model's configuration.
        stored: Sizes of its weight files; None: there are none.
        device: Device that it is to run on.
        dtype: The requested dtype; None: the default.

    Raises:
        UnsupportedModelError: The checkpoint's dtype is not supported.
    """
    quantization = quantization_of(config)
    method = None if quantization is None else method_of(quantization)
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    own = stated if isinstance(stated, torch.dtype) else (stored.dtype if stored is not None else None) or torch.float32
    if dtype is not None:
        return DtypeChoice(own, dtype, "asked for", method)
    require_served(own)
    served = own if method is not None else usual_dtype(own, device)
    why = "the checkpoint's own" if served == own else f"{device.type} has no kernels for the checkpoint's own"
    return DtypeChoice(own, served, why, method)


@dataclass(frozen=True)
class StoredWeights:
    """Sizes of the weights in safetensors files."""

    numbers: Mapping[torch.dtype, int]
    """Count of numbers by dtype."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of most floating-point numbers; None if there are none."""
        return max(self.numbers.keys() & _CONVERTED, key=self.numbers.__getitem__, default=None)

    def served_bytes(self, served: torch.dtype) -> int:
        """Return the bytes of the weights when floating-point numbers are converted to another dtype."""
        return sum(count * (served if dtype in _CONVERTED else dtype).itemsize for dtype, count in self.numbers.items())

    @classmethod
    def read(cls, folder: Path) -> StoredWeights | None:
        """Read the sizes in a folder; None if weight files are missing.

        Raises:
            OSError: A file is damaged.
        """
        files = _weight_files(folder)
        if not files or not all(file.exists() for file in files):
            return None
        numbers: Counter[torch.dtype] = Counter()
        try:
            for file in files:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - it is no mapping
                        tensor = opened.get_tensor(name)  # pages of the file, of which none is read
                        numbers[tensor.dtype] += tensor.numel()
        except SafetensorError as error:
            raise OSError(f"the weights of {str(folder)!r} are damaged: {error}") from error
        return cls(numbers)


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads, and not others such as copies in a vendor's format."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    try:
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise OSError(f"{str(index)!r} is damaged: it does not map weights to files") from error


def needs_of(
    checkpoint: Checkpoint, stored: StoredWeights | None, dtype: torch.dtype, device: torch.device
) -> MemoryNeeds:
    """Return the memory needs of a model; if its files do not show them, build it on the meta device to count."""
    text = checkpoint.config.get_text_config()
    usable = None if is_dense(quantization_of(checkpoint.config), device) else stored
    weights = checkpoint.skeleton().num_parameters() * dtype.itemsize if usable is None else usable.served_bytes(dtype)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    geometry = KVGeometry(text.num_hidden_layers, kv_heads, _head_size(text), dtype)
    return MemoryNeeds(weights, stored is not None, geometry.bytes_per_token, max_positions(text), free_bytes(device))


def _head_size(text: PreTrainedConfig) -> int:
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not isinstance(size, int):
        raise UnsupportedModelError(f"the configuration of model type {text.model_type!r} has no head size")
    return size
