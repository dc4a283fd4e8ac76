"""Backends behind one contract: what attends the layers of a step, and how to get one.

reference    dense, fp64, one token at a time: what the others are compared with
cpu          one folded call for each long segment, one for all short ones, merged; runs on any device
"""

from __future__ import annotations

from typing import Literal

import torch

from choreo_agents.attention.backends.base import AttentionBackend, PreparedAttention
from choreo_agents.attention.backends.cpu import FoldedBackend
from choreo_agents.attention.backends.reference import ReferenceBackend

__all__ = ["AttentionBackend", "BackendName", "PreparedAttention", "available_backends", "make_backend"]

BackendName = Literal["auto", "reference", "cpu"]
"""`auto` is the fastest for the device."""


def available_backends() -> dict[BackendName, torch.device]:
    """Every backend that this machine can run, and the device that it is for."""
    cpu = torch.device("cpu")
    return {"reference": cpu, "cpu": cpu}


def make_backend(name: BackendName, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend of that name, for KV of a dtype on a device."""
    if name == "reference":
        return ReferenceBackend()
    return FoldedBackend(dtype, device)
