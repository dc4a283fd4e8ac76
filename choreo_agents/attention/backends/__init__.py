"""Backends behind one contract: what attends the layers of a step, and how to get one.

reference    dense, fp64, one token at a time: what the others are compared with
folded       one folded call for each long segment, one for all short ones, merged; runs on any device
varlen       the variable-length kernel that torch brings for GPUs, in half precision
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from choreo_agents.attention.backends.base import AttentionBackend, PreparedAttention
from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.varlen import USUAL_HEADS, HeadShape, VarlenBackend
from choreo_agents.errors import InvalidRequestError

__all__ = [
    "AttentionBackend",
    "BackendName",
    "PreparedAttention",
    "available_backends",
    "make_backend",
    "require_backend",
]

BackendName = Literal["auto", "reference", "folded", "varlen"]
"""`auto` is the fastest for the device."""


def available_backends() -> dict[BackendName, torch.device]:
    """Every backend that this machine can run, and the device that it is for."""
    cpu = torch.device("cpu")
    found: dict[BackendName, torch.device] = {"reference": cpu, "folded": cpu}
    if torch.cuda.is_available() and VarlenBackend.tried(torch.bfloat16, torch.device("cuda")) is not None:
        found["varlen"] = torch.device("cuda")
    return found


def require_backend(backend: Any) -> Any:
    """The same backend, or name of one; raises `InvalidRequestError` if it is neither."""
    is_named = isinstance(backend, str) and backend in get_args(BackendName)
    if not is_named and (isinstance(backend, str | type) or not callable(getattr(backend, "prepare", None))):
        names = ", ".join(map(repr, get_args(BackendName)))
        raise InvalidRequestError(
            f"a backend is one of {names}, or an object with prepare(layout, kind), not {backend!r}"
        )
    return backend


def make_backend(
    backend: BackendName | AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    shape: HeadShape = USUAL_HEADS,
) -> AttentionBackend:
    """The backend of that name, for KV of a dtype on a device and heads of a shape; or this very one.

    Raises:
        InvalidRequestError: There is none of that name, or it does not work here.
    """
    name = require_backend(backend)
    if not isinstance(name, str):
        made: AttentionBackend = name
        return made
    if name == "reference":
        return ReferenceBackend()
    if name == "varlen" or (name == "auto" and device.type == "cuda"):
        varlen = VarlenBackend.tried(dtype, device, shape=shape)
        if varlen is not None:
            return varlen
        if name == "varlen":
            raise InvalidRequestError(
                f"the varlen backend does not work for {dtype} on {device}: it needs half precision and a kernel of "
                'torch.nn.attention.varlen that gives right results; "auto" goes without'
            )
    return FoldedBackend(dtype, device)
