"""A model's forward pass without its modelling code: one call of a kernel for each decoder layer.

shape      which models are built so that it can be said
made_of    whether a model still is what the pass was made of
forward    the pass
"""

from __future__ import annotations

from typing import Any

from choreo_agents.attention.heads import HeadShape
from choreo_agents.models.lean.forward import LeanForward
from choreo_agents.models.lean.shape import NotLean, lean_shape
from choreo_agents.native.library import available_kernels

__all__ = ["LeanForward", "NotLean", "lean_forward"]


def lean_forward(model: Any, heads: HeadShape) -> LeanForward:
    """The lean pass of a model whose weights may be laid out; raises `NotLean` if it cannot be had, and says why."""
    kernels = available_kernels()
    if isinstance(kernels, str):
        raise NotLean(f"there are no kernels for this CPU: {kernels}")
    fitting = [each for each in kernels if each.takes(heads.head_dim)]
    if not fitting:
        raise NotLean(f"its heads have {heads.head_dim} dimensions")
    shape = lean_shape(model, heads)
    return LeanForward(model, shape, heads, fitting[0])
