"""What the bits of a run depend on beside what is asked: two engines that agree in it compute the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch

from choreo_agents.engine.core import EngineCore

_KERNEL_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""By which torch's libraries are told to leave instructions out."""


def conditions_of(core: EngineCore) -> dict[str, str]:
    """Of an engine, here and now, by what they are called."""
    adapter, settings, computing = core.model.adapter, core.settings, core.execution.computing()
    return {
        "model": adapter.fingerprint,
        "method": settings.method,
        "dtype": str(adapter.geometry.dtype).removeprefix("torch."),
        "device": _device(adapter.device),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "kernels": _kernels(adapter.device),
        "backend": computing.backend,
        "forward pass": computing.forward.partition(":")[0],
        "prepacked weights": "yes" if core.model.prepacked else "no",
    }


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> Iterator[str]:
    """Each condition that is another here, as one line."""
    for name in {**recorded, **here}:
        if recorded.get(name) != here.get(name):
            yield f"{name}: recorded with {recorded.get(name, 'none')}, here {here.get(name, 'none')}"


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _kernels(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        tf32 = torch.backends.cuda.matmul.allow_tf32
        return f"CUDA {torch.version.cuda}, capability {major}.{minor}, {'' if tf32 else 'no '}tf32"
    told = [f"{name}={os.environ[name]}" for name in _KERNEL_SETTINGS if name in os.environ]
    oned = "oneDNN" if torch.backends.mkldnn.enabled else "no oneDNN"
    return ", ".join([torch.backends.cpu.get_cpu_capability(), oned, *told])
