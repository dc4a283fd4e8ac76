"""The kernel as a backend."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from choreo_agents.attention.backends.native.plan import KernelPlan, Tasks
from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.window import farthest_seen, windowed
from choreo_agents.native.library import found
from choreo_agents.native.structs import ATTEND, BF16, FP32, MERGE, LayerStruct

_DTYPES = (torch.float32, torch.bfloat16)
_WIDEST = 256
"""Dimensions of a head at most."""


class NativeBackend:
    """Attention in one call a layer. `NativeBackend.tried` says whether it can be had.

    Args:
        dtype: Of keys, values and queries.
        shape: Of the model's heads.
    """

    def __init__(self, dtype: torch.dtype, shape: HeadShape) -> None:
        kernels = found()
        assert not isinstance(kernels, str), kernels
        self.dtype = dtype
        self.kernel = next(kernel for kernel in kernels if kernel.takes(shape.head_dim))

    def __str__(self) -> str:
        return f"{type(self).__name__} for {self.kernel.name}"

    @staticmethod
    def tried(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> NativeBackend | str:
        """The backend for heads of a shape; or why there is none."""
        if device.type != "cpu":
            return f"the native kernel is for CPUs, not for {device}"
        if dtype not in _DTYPES:
            return f"the native kernel takes float32 and bfloat16, not {dtype}"
        kernels = found()
        if isinstance(kernels, str):
            return f"there is no native kernel: {kernels}"
        if shape.head_dim > _WIDEST or not any(kernel.takes(shape.head_dim) for kernel in kernels):
            return (
                f"the native kernel takes heads of a multiple of 8 dimensions up to {_WIDEST}, not of {shape.head_dim}"
            )
        return NativeBackend(dtype, shape)

    def prepare(self, layout: Layout, kind: AttentionKind) -> NativeAttention:
        farthest = 0 if kind.window is None else farthest_seen(layout)
        hides = kind.window is not None and farthest >= kind.window
        return NativeAttention(windowed(layout, kind.window or 0) if hides else layout, kind, self, farthest)


class NativeAttention:
    """One step's attention in the layers of one kind."""

    def __init__(self, layout: Layout, kind: AttentionKind, backend: NativeBackend, farthest: int = 0) -> None:
        self.layout = layout
        self.kind = kind
        self._backend = backend
        self._plans: dict[HeadShape, KernelPlan] = {}
        self._layer = LayerStruct()
        self._further, self._farthest = 0, farthest

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """See `PreparedAttention`. For one thread at a time."""
        shape = HeadShape(query.shape[1], keys.shape[0], query.shape[2])
        plan = self.plan(shape)
        assert query.dtype == keys.dtype == values.dtype == self._backend.dtype and query.device.type == "cpu"
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        query = query if query.stride(-1) == 1 else query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device="cpu")
        sinks = None if sinks is None else sinks.float().contiguous()
        layer = self._layer
        layer.query, layer.out = query.data_ptr(), out.data_ptr()
        layer.query_token, layer.query_head, _ = query.stride()
        layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        layer.pool_head, layer.pool_slot, _ = keys.stride()
        layer.sinks = None if sinks is None else sinks.data_ptr()
        layer.scale, layer.dtype = scale, BF16 if query.dtype == torch.bfloat16 else FP32
        self._backend.kernel.attend(plan.address, ctypes.addressof(layer), ATTEND | MERGE)
        return out

    def follow(self) -> bool:
        """See `PreparedAttention`."""
        self._further += 1
        if not self.layout.own:
            return False
        if self.kind.window is not None and self._farthest + self._further >= self.kind.window:
            return False  # it begins to hide what it showed
        # A plan that was not asked for yet would be that of the first step.
        return bool(self._plans) and all(plan.tasks.follow() for plan in self._plans.values())

    def plan(self, shape: HeadShape) -> KernelPlan:
        """For heads of a shape."""
        if shape not in self._plans:
            tasks = Tasks(self.layout, shape.group)
            self._plans[shape] = KernelPlan(tasks, self.kind, shape, self._backend.dtype)
        return self._plans[shape]
