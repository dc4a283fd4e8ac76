"""Attention backends behind one contract, and how one is chosen.

reference    dense, fp64, one token at a time: the oracle that the others are tested against
native       one call of a kernel in C per layer; for CPUs
folded       one folded call for each long segment, one for all short ones, merged; runs on any device
varlen       the variable-length flash kernel of torch for GPUs, in half precision; tried out before it is used
triton       our own kernels for GPUs; `auto` takes them only on GPUs on which `make gpu` has passed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch

from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.triton.backend import TritonBackend
from choreo_agents.attention.backends.varlen import VarlenBackend
from choreo_agents.attention.kind import USUAL_HEADS, HeadShape
from choreo_agents.attention.step import AttentionBackend, PreparedAttention
from choreo_agents.errors import InvalidRequestError
from choreo_agents.native.library import has_tiles, multiply_tiles

__all__ = [
    "AttentionBackend",
    "BackendName",
    "PreparedAttention",
    "backend_name",
    "make_backend",
    "require_backend",
    "why_not_faster",
]

BackendName = Literal["auto", "reference", "folded", "native", "varlen", "triton"]
"""Name of a backend; `auto` is the fastest one that is tested on the device."""


def require_backend(backend: Any) -> Any:
    """Return `backend`; raise `InvalidRequestError` if it is neither a backend nor the name of one."""
    is_named = isinstance(backend, str) and backend in get_args(BackendName)
    if not is_named and (isinstance(backend, str | type) or not callable(getattr(backend, "prepare", None))):
        names = ", ".join(map(repr, get_args(BackendName)))
        raise InvalidRequestError(
            f"`backend` must be one of {names}, or an object with `prepare(layout, kind)`, not {backend!r}"
        )
    return backend


def backend_name(backend: AttentionBackend) -> str:
    """Return a backend's name for logs and reports."""
    return str(backend) if isinstance(backend, NativeBackend) else type(backend).__name__


def why_not_faster(backend: AttentionBackend) -> str:
    """Return why no faster backend is used; empty if none was unavailable."""
    return backend.why if isinstance(backend, FoldedBackend) else ""


def make_backend(
    backend: BackendName | AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    shape: HeadShape = USUAL_HEADS,
) -> AttentionBackend:
    """Return the backend of a name for a dtype, device and shape of heads; return a backend as it is.

    Raises:
        InvalidRequestError: There is no such backend, or it does not work here.
    """
    name = require_backend(backend)
    if not isinstance(name, str):
        own: AttentionBackend = name
        return own
    backend_or_reason = _choose_backend(dtype, device, shape) if name == "auto" else _MAKERS[name](dtype, device, shape)
    if isinstance(backend_or_reason, str):
        raise InvalidRequestError(f'{backend_or_reason}; use backend="auto" to fall back to another backend')
    return backend_or_reason


def _choose_backend(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> AttentionBackend:
    """Return the backend for `auto`."""
    if device.type == "cpu" and dtype == torch.bfloat16 and has_tiles() and not multiply_tiles():
        # On long runs with many readers this outweighs what the kernel saves elsewhere.
        why = "native: on this CPU torch multiplies bfloat16 in tiles, but its kernels are not permitted to"
        return FoldedBackend(dtype, device, why)
    names = ["native" if device.type == "cpu" else "varlen"]  # fastest first
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) in _PASSED:
        names.insert(0, "triton")
    backend_or_reason: AttentionBackend | str = ""
    for name in names:
        backend_or_reason = _MAKERS[name](dtype, device, shape)
        if not isinstance(backend_or_reason, str):
            return backend_or_reason
    return FoldedBackend(dtype, device, str(backend_or_reason))


_MAKERS: Mapping[str, Callable[[torch.dtype, torch.device, HeadShape], AttentionBackend | str]] = {
    "reference": lambda *_: ReferenceBackend(),
    "folded": lambda dtype, device, _: FoldedBackend(dtype, device),
    "native": NativeBackend.tried,
    "varlen": lambda dtype, device, shape: VarlenBackend.tried(dtype, device, shape=shape),
    "triton": TritonBackend.tried,
}
"""Functions that make a backend, by name; they return why not if they cannot."""
_PASSED = {(9, 0)}
"""Compute capabilities of the GPUs on which `make gpu` has passed with our own kernels: H100."""
