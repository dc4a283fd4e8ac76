"""Forward pass of Llama-like models on a CPU without their modelling code: one kernel call per decoder layer.

shape      finds the modules of a model that is built like Llama
made_of    detects changes of the model since the pass was made
forward    the pass
"""

from __future__ import annotations

from typing import Any

from choreo_agents.attention.kind import HeadShape
from choreo_agents.models.lean.forward import LeanForward
from choreo_agents.models.lean.shape import NotLean, lean_shape
from choreo_agents.native.library import available_kernels

__all__ = ["LeanForward", "NotLean", "lean_forward"]


def lean_forward(model: Any, heads: HeadShape) -> LeanForward:
    """Return the lean pass of a model, whose weights it may prepack; raise `NotLean` with the reason if it has none."""
    kernels = available_kernels()
    if isinstance(kernels, str):
        raise NotLean(f"no kernels are available for this CPU: {kernels}")
    fitting = [kernel for kernel in kernels if kernel.takes(heads.head_dim)]
    if not fitting:
        raise NotLean(f"its heads have {heads.head_dim} dimensions")
    shape = lean_shape(model, heads)
    return LeanForward(model, shape, heads, fitting[0])
