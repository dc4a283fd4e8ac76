"""Cache mapper: a low-rank correction of cached keys and values, so that merged branches fit beside each other.

Also the file that says whether a synthesizer reads boundaries: after each branch, the opening of a next turn,
encoded when branches are merged. In an ordinary prompt the first tokens of a turn have attended to the turn before, and
a model may read its last sentences there. In a worker's cache nothing follows the branch, so that they are missed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from choreo_agents.attention.kind import AttentionKind
from choreo_agents.errors import AdapterError
from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.models.adapter_files import require_base
from choreo_agents.models.files import read_tensors, write_tensors, write_text

MAPPER_FILE = "mapper.safetensors"


def usual_rank(geometry: KVGeometry) -> int:
    """Return the default rank, a sixteenth of the width of a layer's keys: a few per mille of a model's parameters."""
    return max(4, geometry.kv_heads * geometry.head_dim // 16)


class CacheMapper(nn.Module):
    """Module that adds `up(down(x)) + bias` to every layer's keys, before rotation, and to its values.

    Untrained it changes nothing: `up` and `bias` start at zero (Parallel-Synthesis, component 2).

    Args:
        geometry: Shape of the model's KV.
        kinds: Attention kind of each layer.
        rank: Rank of the correction; None: `usual_rank`.
    """

    def __init__(self, geometry: KVGeometry, kinds: Sequence[AttentionKind], rank: int | None = None) -> None:
        super().__init__()
        self.rank = usual_rank(geometry) if rank is None else rank
        self.kinds = tuple(kinds)
        width = geometry.kv_heads * geometry.head_dim
        if not 1 <= self.rank <= width:
            raise AdapterError(f"a mapper's rank must be from 1 to {width}, the width of a layer's keys, not {rank!r}")
        for side in ("key", "value"):
            down = torch.randn(geometry.layers, self.rank, width, dtype=torch.float32) * width**-0.5
            setattr(self, f"{side}_down", nn.Parameter(down))
            up = torch.zeros(geometry.layers, width, self.rank, dtype=torch.float32)
            bias = torch.zeros(geometry.layers, width, dtype=torch.float32)
            setattr(self, f"{side}_up", nn.Parameter(up))
            setattr(self, f"{side}_bias", nn.Parameter(bias))

    def map(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer as a synthesizer reads them.

        Args:
            layer: Index of the layer.
            keys: [kv_heads, tokens, head_dim], rotated to `positions`; `values` of the same shape.
            positions: [tokens].
        """
        rotation = self.kinds[layer].rotation
        plain = keys.transpose(0, 1)
        if rotation is None:
            moved = plain + self._residual("key", layer, plain)
        else:
            cos, sin = rotation.cos_sin(positions)
            # Only the residual is rotated back and forth, so that a mapper of zeros changes no bit.
            residual = self._residual("key", layer, rotation.apply(plain, cos, -sin))
            moved = plain + rotation.apply(residual, cos, sin)
        side = values.transpose(0, 1)
        mapped = side + self._residual("value", layer, side)
        return moved.transpose(0, 1), mapped.transpose(0, 1)

    def moved(self, layer: int, keys: Tensor, shift: int) -> Tensor:
        """Rotate keys of a layer, [kv_heads, tokens, head_dim], as if encoded `shift` positions later."""
        rotation = self.kinds[layer].rotation
        return rotation.move(keys, shift) if shift and rotation is not None else keys

    def _residual(self, side: str, layer: int, x: Tensor) -> Tensor:
        """Return `up(down(x)) + bias`; all are [tokens, kv_heads, head_dim]."""
        down, up, bias = (getattr(self, f"{side}_{part}")[layer].to(x.dtype) for part in ("down", "up", "bias"))
        residual: Tensor = (x.flatten(1) @ down.T @ up.T + bias).view(x.shape)
        return residual

    @property
    def fingerprint(self) -> str:
        """Hash of its weights, 16 hex digits."""
        code = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            code.update(name.encode())
            code.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return code.hexdigest()[:16]

    def save(self, folder: Path, base: str) -> None:
        """Write the mapper into a folder, with the fingerprint of the weights that it was trained for.

        Raises:
            OSError: It cannot be written; an older file is left as it was.
        """
        write_tensors(folder / MAPPER_FILE, self.state_dict(), {"base": base, "rank": str(self.rank)})


def load_mapper(folder: Path, geometry: KVGeometry, kinds: Sequence[AttentionKind], base: str) -> CacheMapper:
    """Read the mapper of a folder.

    Args:
        folder: Folder that `CacheMapper.save` wrote to.
        geometry: Shape of the model's KV; `kinds` as for `CacheMapper`.
        base: Fingerprint of the model's weights.

    Raises:
        AdapterError: There is none, it was trained for other weights, or its tensors do not fit.
    """
    path = folder / MAPPER_FILE
    if not path.is_file():
        raise AdapterError(f"there is no {MAPPER_FILE} in {str(folder)!r}: choreo train synthesizer writes one")
    try:
        tensors, metadata = read_tensors(path)
    except OSError as error:
        raise AdapterError(str(error)) from error
    require_base(f"the mapper in {str(folder)!r}", metadata.get("base"), base)
    down = tensors.get("key_down")
    if down is None or down.ndim != 3:
        raise AdapterError(f"{str(path)!r} is not a cache mapper: it has no key_down with three dimensions")
    mapper = CacheMapper(geometry, kinds, down.shape[1])
    try:
        mapper.load_state_dict(tensors)
    except RuntimeError as error:
        raise AdapterError(f"{str(path)!r} does not fit the model: {str(error).splitlines()[-1].strip()}") from error
    return mapper.eval().requires_grad_(False)


MERGING_FILE, _BOUNDARIES = "merging.json", '{"boundaries":true}\n'


def write_boundaries(folder: Path) -> None:
    """Note beside an adapter or a mapper that it was trained with boundaries.

    Raises:
        OSError: It cannot be written.
    """
    write_text(folder / MERGING_FILE, _BOUNDARIES)


def reads_boundaries(folder: Path) -> bool:
    """Return whether the adapter of a folder was trained with boundaries.

    Raises:
        AdapterError: The file that says so is damaged, or of a later version.
    """
    path = folder / MERGING_FILE
    try:
        content = json.loads(path.read_bytes()) if path.exists() else {}
        if content not in ({}, json.loads(_BOUNDARIES), {"boundaries": False}):
            raise ValueError("it has other fields")
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{str(path)!r} cannot be read: train again, or remove it") from error
    return bool(content.get("boundaries"))
