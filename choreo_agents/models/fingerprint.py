"""Tells models apart by their weights, and remembers those of large files that have not changed."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import cached_assets_path
from torch import Tensor

from choreo_agents.models.files import write_text
from choreo_agents.models.weights.prepacked import plain_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORTH_KEEPING = 1 << 24
"""Bytes of weights below which reading them again is as quick as looking it up."""
_SETTLED_S = 2.0
"""Seconds after which another change of a file is sure to change its times."""
_BLOCK = 1 << 18
"""Numbers that are added up at a time on a CPU, where they fit the cache; a device takes 256 times as many."""
_SAMPLES = 4096
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COSMETIC = ("_name_or_path", "transformers_version", "_attn_implementation_internal", "dtype", "torch_dtype")
"""Settings that change with where a model was found and who runs it."""


def fingerprint(model: PreTrainedModel, *, rounded: bool = False) -> str:
    """16 hex digits that tell models apart: architecture, dtype, and every row of every tensor.

    With `rounded`, of the weights in bfloat16: the same for the fp32 ones. Those in fp16 were rounded otherwise.
    """
    code = hashlib.sha256(_settings(model).encode())
    if not rounded:
        code.update(str(model.dtype).encode())
    # With variables: weights that are laid out are made plain one by one, and not all at once.
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
    """Sums of bit patterns, by row: every weight counts, and they are exact whatever the order of addition."""
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
    kept = weights.to(torch.bfloat16) if rounded and weights.is_floating_point() else weights
    return kept.view(_BITS[kept.element_size()])


def _row_sums(bits: Tensor) -> bytes:
    # numpy's sums take a fifth of the time of torch's, which first writes all numbers down as int64.
    if bits.device.type == "cpu":
        return bytes(bits.numpy().sum(axis=-1, dtype="int64").tobytes())
    return _host_bytes(bits.sum(dim=-1, dtype=torch.int64))


def _host_bytes(numbers: Tensor) -> bytes:
    return bytes(numbers.cpu().numpy().tobytes())


@dataclass(frozen=True)
class WeightFiles:
    """The files that a model was read from, as they were then."""

    folder: Path
    stamp: str
    """Names, places, sizes and times."""
    settled: bool = field(compare=False)
    """Whether the last change was so long before that another one is sure to change the times."""
    size: int
    """Bytes of weights."""

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Those of a checkpoint's folder, now."""
        found: list[tuple[str | int, ...]] = []
        changed, size, now = 0.0, 0, time.time()
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
            real = path.resolve()
            try:
                state = real.stat()
            except OSError:  # gone, or a link to nowhere: whoever needs it will say so
                found.append((path.name, str(real)))
                continue
            found.append((path.name, str(real), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
            changed = max(changed, state.st_mtime, state.st_ctime)
            size += state.st_size if path.suffix == ".safetensors" else 0
        return cls(folder, repr(found), now - changed > _SETTLED_S, size)

    def remembered(self, model: PreTrainedModel, *, rounded: bool = False) -> str:
        """The model's `fingerprint`: looked up if these files have not changed since it was found out.

        Nothing is written for small files, for files that changed a moment ago, and where nothing can be written.
        """
        import transformers  # noqa: PLC0415 - loading the model has

        # What is read from the same files may depend on who reads it, and where: quantised weights stay so on a GPU.
        read = [
            (name, *tensor.shape, type(tensor.data).__name__, str(tensor.dtype))
            for name, tensor in model.state_dict(keep_vars=True).items()
        ]
        how = repr((self.stamp, type(model).__name__, _settings(model), read, rounded, transformers.__version__))
        find_out = partial(fingerprint, model, rounded=rounded)
        if self.size < WORTH_KEEPING or WeightFiles.of(self.folder) != self:
            return find_out()
        try:
            known = cached_assets_path("choreo-agents", "models", "fingerprints")
            place = known / f"{hashlib.sha256(how.encode()).hexdigest()[:32]}.json"
            said: Any = _said(place)
        except OSError:
            return find_out()
        if isinstance(said, dict) and isinstance(said.get("fingerprint"), str):
            return str(said["fingerprint"])
        found = find_out()
        if self.settled and WeightFiles.of(self.folder) == self:
            with suppress(OSError):
                write_text(place, json.dumps({"fingerprint": found, "weights": str(self.folder)}))
        return found


def _said(place: Path) -> Any:
    """What a file of the cache says; nothing if there is none, or it is damaged and to be written anew."""
    try:
        return json.loads(place.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
