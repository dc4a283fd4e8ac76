"""Backends behind one contract: what attends the layers of a step, and how to get one.

reference    dense, fp64, one token at a time: what the others are compared with
native       one call of a kernel in C for all of a layer; for CPUs
folded       one folded call for each long segment, one for all short ones, merged; runs on any device
varlen       the variable-length flash kernel that torch brings for GPUs, in half precision; tried before it is used
triton       kernels of our own for GPUs; by name only on kinds on which `make gpu` has not passed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from choreo_agents.attention.backends.folded import FoldedBackend
from choreo_agents.attention.backends.native import NativeBackend
from choreo_agents.attention.backends.reference import ReferenceBackend
from choreo_agents.attention.backends.triton.backend import TritonBackend
from choreo_agents.attention.backends.varlen import VarlenBackend
from choreo_agents.attention.heads import USUAL_HEADS, HeadShape
from choreo_agents.attention.step import AttentionBackend, PreparedAttention
from choreo_agents.errors import InvalidRequestError
from choreo_agents.native.library import has_tiles, multiply_tiles

__all__ = [
    "AttentionBackend",
    "BackendName",
    "PreparedAttention",
    "backend_name",
    "backend_summary",
    "make_backend",
    "require_backend",
    "why_not_faster",
]

BackendName = Literal["auto", "reference", "folded", "native", "varlen", "triton"]
"""`auto` is the fastest for the device of those that have passed there."""


def require_backend(backend: Any) -> Any:
    """The same backend, or name of one; raises `InvalidRequestError` if it is neither."""
    is_named = isinstance(backend, str) and backend in get_args(BackendName)
    if not is_named and (isinstance(backend, str | type) or not callable(getattr(backend, "prepare", None))):
        names = ", ".join(map(repr, get_args(BackendName)))
        raise InvalidRequestError(
            f"a backend is one of {names}, or an object with prepare(layout, kind), not {backend!r}"
        )
    return backend


def backend_name(backend: AttentionBackend) -> str:
    """What attends, in words."""
    return str(backend) if isinstance(backend, NativeBackend) else type(backend).__name__


def why_not_faster(backend: AttentionBackend) -> str:
    """Why what is faster where it works does not attend here; empty if nothing was in the way."""
    return backend.why if isinstance(backend, FoldedBackend) else ""


def backend_summary(backend: AttentionBackend) -> tuple[str, str]:
    """Both: what attends, and why nothing faster does."""
    return backend_name(backend), why_not_faster(backend)


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
        own: AttentionBackend = name
        return own
    made = _usual(dtype, device, shape) if name == "auto" else _MAKERS[name](dtype, device, shape)
    if isinstance(made, str):
        raise InvalidRequestError(f'{made}; "auto" goes without')
    return made


def _usual(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> AttentionBackend:
    """What `auto` is."""
    if device.type == "cpu" and dtype == torch.bfloat16 and has_tiles() and not multiply_tiles():
        # On long runs that many read that outweighs what else the kernel saves.
        why = "native: torch's operators multiply tiles of bfloat16s here, which its kernels may not"
        return FoldedBackend(dtype, device, why)
    made: AttentionBackend | str = ""
    for fastest in _fastest(device):
        made = _MAKERS[fastest](dtype, device, shape)
        if not isinstance(made, str):
            return made
    return FoldedBackend(dtype, device, str(made))


def _fastest(device: torch.device) -> Sequence[str]:
    """What `auto` tries on a device, one after the other."""
    if device.type == "cpu":
        return ("native",)
    is_there = device.type == "cuda" and torch.cuda.is_available()
    if is_there and torch.cuda.get_device_capability(device) in _PASSED:
        return ("triton", "varlen")
    return ("varlen",)


_MAKERS: Mapping[str, Callable[[torch.dtype, torch.device, HeadShape], AttentionBackend | str]] = {
    "reference": lambda *_: ReferenceBackend(),
    "folded": lambda dtype, device, _: FoldedBackend(dtype, device),
    "native": NativeBackend.tried,
    "varlen": lambda dtype, device, shape: VarlenBackend.tried(dtype, device, shape=shape),
    "triton": TritonBackend.tried,
}
"""A backend by name, or why there is none."""
_PASSED = {(9, 0)}
"""Compute capabilities of the GPUs on which `make gpu` has passed, with our own kernels: of an H100."""
