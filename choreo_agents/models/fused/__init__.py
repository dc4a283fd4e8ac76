"""A model's forward pass on a GPU without its modelling code: products by torch, and a launch for all that lies between
two of them.

kernels    in Triton
forward    the pass
"""

from __future__ import annotations

from typing import Any

from choreo_agents.attention.backends.triton.backend import why_no_kernels
from choreo_agents.attention.heads import HeadShape
from choreo_agents.models.fused.forward import FusedForward
from choreo_agents.models.lean.shape import NotLean, lean_shape

__all__ = ["FusedForward", "fused_forward"]


def fused_forward(model: Any, heads: HeadShape) -> FusedForward:
    """The pass of a model whose weights may be laid out side by side; raises `NotLean` if it cannot be had."""
    why = why_no_kernels()
    if why is not None:
        raise NotLean(why)
    return FusedForward(model, lean_shape(model, heads, laid_out=False), heads)
