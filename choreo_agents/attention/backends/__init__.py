"""Backends behind one contract: what attends the layers of a step, and how to get one.

reference    dense, fp64, one token at a time: what the others are compared with
folded       one folded call for each long segment, one for all short ones, merged; runs on any device
varlen       the variable-length kernel that torch brings for GPUs, in half precision
"""

from __future__ import annotations

from typing import Literal

import torch

from choreo_agents.attention.backends.base import AttentionBackend, PreparedAttention
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.varlen import USUAL_HEADS, HeadShape, VarlenBackend
from choreo_agents.errors import InvalidRequestError

__all__ = ["AttentionBackend", "BackendName", "PreparedAttention", "available_backends", "make_backend"]

BackendName = Literal["auto", "reference", "folded", "varlen"]
"""`auto` is the fastest for the device."""


def available_backends() -> dict[BackendName, torch.device]:
    """Every backend that this machine can run, and the device that it is for."""
    cpu = torch.device("cpu")
    found: dict[BackendName, torch.device] = {"reference": cpu, "folded": cpu}
    if torch.cuda.is_available() and VarlenBackend.tried(torch.bfloat16, torch.device("cuda")) is not None:
        found["varlen"] = torch.device("cuda")
    return found


def make_backend(
    name: BackendName, dtype: torch.dtype, device: torch.device, shape: HeadShape = USUAL_HEADS
) -> AttentionBackend:
    """The backend of that name, for KV of a dtype on a device and heads of a shape.

    Raises:
        InvalidRequestError: It was asked for by name and does not work here.
    """
    if name == "reference":
        return ReferenceBackend()
    if name == "varlen" or (name == "auto" and device.type == "cuda"):
        backend = VarlenBackend.tried(dtype, device, shape=shape)
        if backend is not None:
            return backend
        if name == "varlen":
            raise InvalidRequestError(
                f"the varlen backend does not work for {dtype} on {device}: it needs half precision and a kernel of "
                'torch.nn.attention.varlen that gives right results; "auto" goes without'
            )
    return FoldedBackend(dtype, device)
