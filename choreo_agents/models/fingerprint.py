"""Fingerprints models by their weights, and caches the fingerprints of large files."""

from __future__ import annotations

import hashlib
import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import cached_assets_path
from torch import Tensor

from choreo_agents.models.files import write_text
from choreo_agents.models.weights.prepacked import plain_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORTH_KEEPING = 1 << 24
"""Bytes of weights below which computing the fingerprint is as fast as looking it up."""
_SETTLED_S = 2.0
"""Seconds after which another change of a file surely changes its time stamps."""
_BLOCK = 1 << 18
"""Numbers that are summed at a time on a CPU, to fit its cache; a GPU takes 256 times as many."""
_SAMPLES = 4096
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGEST = re.compile("[0-9a-f]{16}")
_COSMETIC = ("_name_or_path", "transformers_version", "_attn_implementation_internal", "dtype", "torch_dtype")
"""Settings that depend on where a model was found and which version runs it, not on the model."""


def fingerprint(model: PreTrainedModel, *, rounded: bool = False) -> str:
    """Return 16 hex digits from a model's architecture, dtype, and every row of every tensor.

    With `rounded`, weights are rounded to bfloat16 first and the dtype is left out: fp32 and bfloat16 copies of a model
    agree. fp16 copies do not.
    """
    code = hashlib.sha256(_settings(model).encode())
    if not rounded:
        code.update(str(model.dtype).encode())
    # With `keep_vars`, prepacked weights are unpacked one by one, not all at once.
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        code.update(f"{name}{tuple(tensor.shape)}".encode())
        code.update(_digest(plain_weight(tensor), rounded=rounded))
    return code.hexdigest()[:16]


def _settings(model: PreTrainedModel) -> str:
    settings = model.config.to_diff_dict()
    for name in _COSMETIC:
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True, default=str)


def _digest(tensor: Tensor, *, rounded: bool) -> bytes:
    """Return sums of bit patterns by row, which are exact in any order of addition, and some samples."""
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: numbers and scales
        parts = sorted(tensor.__tensor_flatten__()[0])
        return b"".join(name.encode() + _digest(getattr(tensor, name), rounded=rounded) for name in parts)
    flat = tensor.contiguous().flatten()
    rows = flat.view(-1, tensor.shape[-1]) if tensor.ndim and flat.numel() else flat[:, None]
    most = _BLOCK if rows.device.type == "cpu" else _BLOCK << 8
    blocks = torch.split(rows, max(1, most // max(1, rows.shape[-1])))
    sums = b"".join(_row_sums(_bits(block, rounded=rounded)) for block in blocks)
    return sums + _host_bytes(_bits(flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES], rounded=rounded))


def _bits(weights: Tensor, *, rounded: bool) -> Tensor:
    values = weights.to(torch.bfloat16) if rounded and weights.is_floating_point() else weights
    return values.view(_BITS[values.element_size()])


def _row_sums(bits: Tensor) -> bytes:
    # numpy takes a fifth of the time of torch, which first copies all numbers to int64.
    if bits.device.type == "cpu":
        return bytes(bits.numpy().sum(axis=-1, dtype="int64").tobytes())
    return _host_bytes(bits.sum(dim=-1, dtype=torch.int64))


def _host_bytes(numbers: Tensor) -> bytes:
    return bytes(numbers.cpu().numpy().tobytes())


@dataclass(frozen=True)
class WeightFiles:
    """The files that a model is read from, with their state at that time."""

    folder: Path
    stamp: str
    """Names, resolved paths, sizes and times, as text."""
    settled: bool = field(compare=False)
    """Whether the last change is so old that another one surely changes the time stamps."""
    size: int
    """Bytes of weights."""

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Read the current state of the files in a checkpoint's folder."""
        entries: list[tuple[str | int, ...]] = []
        changed, size, now = 0.0, 0, time.time()
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
            real = path.resolve()
            try:
                state = real.stat()
            except OSError:  # gone, or a dangling link: loading reports it
                entries.append((path.name, str(real)))
                continue
            entries.append((path.name, str(real), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
            changed = max(changed, state.st_mtime, state.st_ctime)
            size += state.st_size if path.suffix == ".safetensors" else 0
        return cls(folder, repr(entries), now - changed > _SETTLED_S, size)

    def cached_fingerprint(self, model: PreTrainedModel, *, rounded: bool = False) -> str:
        """Return the model's `fingerprint`, from the cache if these files have not changed since it was computed.

        Fingerprints of small or just changed files are not cached, nor if the cache cannot be written.
        """
        import transformers  # noqa: PLC0415 - loading the model has

        # The same files may load differently per device and version: quantised weights stay quantised on a GPU only.
        read = [
            (name, *tensor.shape, type(tensor.data).__name__, str(tensor.dtype))
            for name, tensor in model.state_dict(keep_vars=True).items()
        ]
        key = repr((self.stamp, type(model).__name__, _settings(model), read, rounded, transformers.__version__))
        compute = partial(fingerprint, model, rounded=rounded)
        if self.size < WORTH_KEEPING or WeightFiles.of(self.folder) != self:
            return compute()
        try:
            directory = cached_assets_path("choreo-agents", "models", "fingerprints")
            path = directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.txt"
            cached = path.read_text(errors="replace") if path.exists() else ""
        except OSError:
            return compute()
        if _DIGEST.fullmatch(cached):
            return cached
        digest = compute()
        if self.settled and WeightFiles.of(self.folder) == self:
            with suppress(OSError):
                write_text(path, digest)
        return digest
