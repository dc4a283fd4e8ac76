"""Rotation of queries by a position difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

Pairing = Literal["halves", "neighbours"]
"""Pairs of dimensions that rotate together: i with i + half (Llama, GPT-NeoX), or 2i with 2i + 1 (Cohere, GPT-J)."""


@dataclass(frozen=True, eq=False)
class PureRotation:
    """The rotation part of a model's RoPE, without any scaling of its cos and sin.

    A key encoded at position a and shown at b is read by a query rotated by -(b - a): scores depend on position
    differences only, so this equals moving the key, and copies nothing. Rotating twice by a model's own cos and sin
    would apply an attention scaling (YaRN) twice; this rotation has none.
    """

    inverse_frequencies: Tensor
    """[rotated dimensions / 2], radians per position; on the host."""
    pairing: Pairing = "halves"
    first: int = 0
    """The first dimension that rotates; those before it, and those after the last pair, do not."""

    @property
    def dimensions(self) -> int:
        """Number of dimensions of a head that rotate."""
        return 2 * len(self.inverse_frequencies)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [len(positions), dimensions / 2] fp32, for integer position differences."""
        # fp64: a product of a large difference and a frequency loses radians in fp32.
        angles = positions.double()[:, None] * self.inverse_frequencies.double()[None, :].to(positions.device)
        return angles.cos().float(), angles.sin().float()

    def on_host(self, positions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the same as numpy arrays, for tables that are made on the host."""
        angles = positions.astype(numpy.float64)[:, None] * self.inverse_frequencies.double().numpy()[None, :]
        return numpy.cos(angles).astype(numpy.float32), numpy.sin(angles).astype(numpy.float32)

    def apply(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [n, heads, head_dim] by angles given as [n, dimensions / 2].

        Computed in fp32 or wider, returned in the input's dtype.
        """
        if self.dimensions == vectors.shape[-1]:
            return self._rotate(vectors, cos, sin)
        end = self.first + self.dimensions
        turned = self._rotate(vectors[..., self.first : end], cos, sin)
        return torch.cat((vectors[..., : self.first], turned, vectors[..., end:]), dim=-1)

    def move(self, keys: Tensor, shift: int) -> Tensor:
        """Rotate keys, [kv_heads, slots, head_dim], as if encoded `shift` positions later."""
        cos, sin = self.cos_sin(torch.full((keys.shape[1],), shift, device=keys.device))
        return self.apply(keys.transpose(0, 1), cos, sin).transpose(0, 1)

    def _rotate(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = vectors.to(torch.promote_types(vectors.dtype, cos.dtype))
        cos, sin = cos[:, None, :], sin[:, None, :]
        if self.pairing == "halves":
            left, right = wide.chunk(2, dim=-1)
            parts = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        else:
            left, right = wide[..., ::2], wide[..., 1::2]
            parts = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)
        return parts.to(vectors.dtype)
