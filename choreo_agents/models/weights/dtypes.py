"""Chooses the dtype that a checkpoint is served in."""

from __future__ import annotations

import torch

from choreo_agents.errors import UnsupportedModelError

SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Supported dtypes by their short names in options."""
SERVED = tuple(SHORT.values())


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device computes in a dtype natively, without converting around every product."""
    if dtype == torch.float32 or device.type != "cpu":
        return True
    looked_for = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supported = getattr(torch.ops.mkldnn, looked_for.get(dtype, ""), None)
    return supported is not None and bool(supported())


def usual_dtype(own: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the checkpoint's own dtype if the device has kernels for it, else fp32."""
    return own if has_kernels(own, device) else torch.float32


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Parse a dtype: `torch.bfloat16`, `"torch.bfloat16"`, `"bfloat16"` or `"bf16"`; None for `"auto"`.

    Raises:
        UnsupportedModelError: It is no dtype, or not supported.
    """
    if dtype is None or dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.")
    resolved = SHORT.get(name) or getattr(torch, name, None)
    if not isinstance(resolved, torch.dtype) or resolved not in SERVED:
        require_served(dtype)
    return resolved


def require_served(dtype: torch.dtype | str) -> None:
    """Raise `UnsupportedModelError` for an unsupported dtype."""
    if dtype not in SERVED:
        raise UnsupportedModelError(f'dtype {dtype!r} is not supported: use float32, bfloat16 or float16, or "auto"')
