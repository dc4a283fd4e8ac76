"""In which dtype a checkpoint is served."""

from __future__ import annotations

import torch

from choreo_agents.errors import UnsupportedModelError

SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Those that are served, as options name them."""
SERVED = tuple(SHORT.values())


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device computes in a dtype, rather than rounding from and to another around every product."""
    if dtype == torch.float32 or device.type != "cpu":
        return True
    looked_for = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    supported = getattr(torch.ops.mkldnn, looked_for.get(dtype, ""), None)
    return supported is not None and bool(supported())


def usual_dtype(own: torch.dtype, device: torch.device) -> torch.dtype:
    """The checkpoint's own, which is served, if the device has kernels for it, else fp32."""
    return own if has_kernels(own, device) else torch.float32


def dtype_named(said: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that is meant: `torch.bfloat16`, `"torch.bfloat16"`, `"bfloat16"` or `"bf16"`; None for `"auto"`.

    Raises:
        UnsupportedModelError: It is none, or no engine serves it.
    """
    if said is None or said == "auto":
        return None
    name = str(said).removeprefix("torch.")
    found = SHORT.get(name) or getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or found not in SERVED:
        require_served(said)
    return found


def require_served(dtype: torch.dtype | str) -> None:
    """Raise `UnsupportedModelError` for a dtype that no engine serves."""
    if dtype not in SERVED:
        raise UnsupportedModelError(f'dtype {dtype!r} is not supported: use float32, bfloat16 or float16, or "auto"')
