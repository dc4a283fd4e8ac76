"""Which attention backends this machine has."""

from __future__ import annotations

import torch

from choreo_agents.attention.backends import BackendName, make_backend
from choreo_agents.errors import InvalidRequestError


def available_backends() -> dict[BackendName, torch.device]:
    """Every backend that this machine can run, and the device that it is for."""
    cpu = torch.device("cpu")
    gpu = torch.device("cuda") if torch.cuda.is_available() else cpu
    found: dict[BackendName, torch.device] = {}
    for name in ("reference", "folded", "native", "varlen", "triton"):
        dtype, device = (torch.bfloat16, gpu) if name in ("varlen", "triton") else (torch.float32, cpu)
        try:
            make_backend(name, dtype, device)
        except InvalidRequestError:
            continue
        found[name] = device
    return found
