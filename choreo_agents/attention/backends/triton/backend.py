"""The kernels as a backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from choreo_agents.attention.backends.trial import complaint_of, error_line
from choreo_agents.attention.backends.triton.plan import PlannedStep, PlanSizes, StepPlan
from choreo_agents.attention.backends.triton.tiles import tiles
from choreo_agents.attention.heads import HeadShape
from choreo_agents.attention.kind import AttentionKind
from choreo_agents.attention.layout import Layout
from choreo_agents.attention.window import farthest_seen, windowed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
"""Dimensions of a head at most."""


class TritonBackend:
    """Attention in at most four launches a layer. `TritonBackend.tried` says whether it can be had.

    Args:
        dtype: Of keys, values and queries.
        device: Where they are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    @staticmethod
    def tried(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> TritonBackend | str:
        """The backend for heads of a shape, which is tried where it was compiled; or why there is none."""
        interpreted = _interpreted()
        if isinstance(interpreted, str):
            return interpreted
        if dtype not in _DTYPES:
            return f"triton takes float32, bfloat16 and float16, not {dtype}"
        if shape.head_dim > _WIDEST:
            return f"triton takes heads of up to {_WIDEST} dimensions, not of {shape.head_dim}"
        if not interpreted and device.type != "cuda":
            return f"triton is for GPUs, not for {device}, unless TRITON_INTERPRET=1 says to interpret it, slowly"
        complaint = None if interpreted else _complaint(dtype, device, shape)
        return complaint or TritonBackend(dtype, device)

    def prepare(self, layout: Layout, kind: AttentionKind) -> TritonAttention:
        return self.prepare_step(layout, (kind,))[kind]

    def prepare_step(
        self, layout: Layout, kinds: Sequence[AttentionKind], told: StepPlan | None = None
    ) -> Mapping[AttentionKind, TritonAttention]:
        """See `AttentionBackend`; `told` is a plan that is sent already."""
        step = _TritonStep(layout, kinds, self, told)
        return {kind: TritonAttention(step, kind, self) for kind in kinds}

    def plan_step(self, layout: Layout, kinds: Sequence[AttentionKind], shape: HeadShape) -> PlannedStep:
        """See `AttentionBackend`."""
        return PlannedStep(layout, kinds, shape, tiles(shape, self.dtype))

    def tables(self, planned: PlannedStep, sizes: PlanSizes) -> StepPlan:
        """See `AttentionBackend`."""
        return StepPlan(planned, self.device, sizes)

    def prepare_planned(self, planned: PlannedStep, told: StepPlan) -> Mapping[AttentionKind, TritonAttention]:
        """See `AttentionBackend`."""
        return self.prepare_step(planned.layout, tuple(planned.kinds), told)


def why_no_kernels() -> str | None:
    """Why no kernels in Triton can be run on a GPU, or interpreted; None if they can."""
    found = _interpreted()
    return found if isinstance(found, str) else None


def _interpreted() -> bool | str:
    """Whether kernels are interpreted; or why there are none."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'choreo-agents[kernels]'"
    try:
        from choreo_agents.attention.backends.triton.launch import is_interpreted  # noqa: PLC0415 - an extra
    except (ImportError, OSError, RuntimeError) as error:
        return f"triton cannot be imported: {error_line(error)}"
    return is_interpreted()


@cache
def _complaint(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> str | None:
    complaint = complaint_of(TritonBackend(dtype, device), shape, dtype, device)
    return complaint and f"triton: {complaint}"


class _TritonStep:
    """What the kinds of a step share."""

    def __init__(
        self,
        layout: Layout,
        kinds: Sequence[AttentionKind],
        backend: TritonBackend,
        told: StepPlan | None,
    ) -> None:
        self.layout, self.kinds = layout, kinds
        self._backend = backend
        self._plans: dict[HeadShape, StepPlan] = {} if told is None else {told.shape: told}
        self.farthest = farthest_seen(layout) if any(kind.window is not None for kind in kinds) else 0
        self.further = 0
        """Steps since it was prepared."""
        self.goes_on = True
        """Whether it is the step that it was asked to be."""

    def hides(self, kind: AttentionKind) -> bool:
        """Whether a kind's window hides something of what the layout has."""
        return kind.window is not None and self.farthest + self.further >= kind.window

    def plan(self, shape: HeadShape) -> StepPlan:
        """For heads of a shape."""
        if shape not in self._plans:
            planned = self._backend.plan_step(self.layout, self.kinds, shape)
            self._plans[shape] = StepPlan(planned, self._backend.device)
        return self._plans[shape]

    def follow(self) -> None:
        """Be the next step, unless it has to be prepared anew."""
        self.further += 1
        self.goes_on = bool(self.layout.own) and not any(self.hides(kind) for kind in self.kinds)
        # A plan that was not asked for yet would be that of the first step.
        self.goes_on = self.goes_on and bool(self._plans) and all(plan.follow() for plan in self._plans.values())


class TritonAttention:
    """One step's attention in the layers of one kind."""

    def __init__(self, step: _TritonStep, kind: AttentionKind, backend: TritonBackend) -> None:
        self.layout = windowed(step.layout, kind.window or 0) if step.hides(kind) else step.layout
        self.kind = kind
        self._step, self._backend = step, backend
        self._further = 0

    def store(self, heads: int, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `PreparedAttention`."""
        from choreo_agents.attention.backends.triton import launch  # noqa: PLC0415 - an extra

        launch.store(self._step.plan(HeadShape(heads, *key.shape[::2])), key, value, keys, values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """See `PreparedAttention`."""
        from choreo_agents.attention.backends.triton import launch  # noqa: PLC0415 - an extra

        assert query.dtype == keys.dtype == values.dtype == self._backend.dtype
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        shape = HeadShape(query.shape[1], keys.shape[0], query.shape[2])
        return launch.attend(self._step.plan(shape), self.kind, query, keys, values, scale, sinks)

    def follow(self) -> bool:
        """See `PreparedAttention`: whichever kind is asked first goes on for all of them."""
        if self._step.further == self._further:
            self._step.follow()
        self._further += 1
        return self._step.goes_on
