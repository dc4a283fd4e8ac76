"""In which dtype a checkpoint is served."""

from __future__ import annotations

import torch

from choreo_agents.errors import UnsupportedModelError

SERVED = (torch.float32, torch.bfloat16, torch.float16)


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device computes in a dtype, rather than rounding from and to another around every product."""
    if dtype == torch.float32 or device.type != "cpu":
        return True
    looked_for = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supported = getattr(torch.ops.mkldnn, looked_for.get(dtype, ""), None)
    return supported is not None and bool(supported())


def usual_dtype(own: torch.dtype, device: torch.device) -> torch.dtype:
    """The checkpoint's own if the device has kernels for it, else fp32.

    Raises:
        UnsupportedModelError: No device computes in it.
    """
    require_served(own)
    return own if has_kernels(own, device) else torch.float32


def require_served(dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` for a dtype that no engine serves."""
    if dtype not in SERVED:
        raise UnsupportedModelError(f"dtype {dtype} is not supported: use float32, bfloat16 or float16")
