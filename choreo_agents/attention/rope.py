"""Rotation of queries by a position difference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PureRotation:
    """The rotation part of a model's RoPE, without any scaling of its cos and sin.

    A key encoded at position a and shown at b meets a query that is rotated by -(b - a): scores depend on position
    differences only, so this equals moving the key, and copies nothing. Passing twice through a model's own cos and
    sin would apply an attention scaling (YaRN) twice; this never does.

    Dimensions are paired half with half (i with i + head_dim / 2), as in Llama.
    """

    inverse_frequencies: Tensor
    """[head_dim / 2], radians per position."""

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [len(positions), head_dim / 2] fp32, of integer position differences."""
        # fp64: a product of a large difference and a frequency loses radians in fp32.
        angles = positions.double()[:, None] * self.inverse_frequencies.double()[None, :].to(positions.device)
        return angles.cos().float(), angles.sin().float()

    @staticmethod
    def apply(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [n, heads, head_dim] by angles given as [n, head_dim / 2].

        Computed in fp32 or wider, returned in the input's dtype.
        """
        wide = torch.promote_types(vectors.dtype, cos.dtype)
        left, right = vectors.to(wide).chunk(2, dim=-1)
        cos, sin = cos[:, None, :], sin[:, None, :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(vectors.dtype)
