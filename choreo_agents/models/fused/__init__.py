"""Forward pass of Llama-like models on a GPU without their modelling code, with fused kernels between matrix products.

kernels    Triton kernels
forward    the pass
"""

from __future__ import annotations

from typing import Any

from choreo_agents.attention.backends.triton.backend import why_no_kernels
from choreo_agents.attention.kind import HeadShape
from choreo_agents.models.fused.forward import FusedForward
from choreo_agents.models.lean.shape import NotLean, lean_shape

__all__ = ["FusedForward", "fused_forward"]


def fused_forward(model: Any, heads: HeadShape) -> FusedForward:
    """Return the fused pass of a model, whose weights it concatenates; raise `NotLean` if there is none."""
    why = why_no_kernels()
    if why is not None:
        raise NotLean(why)
    return FusedForward(model, lean_shape(model, heads, laid_out=False), heads)
