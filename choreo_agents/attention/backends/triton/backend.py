"""Attention backend of the Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from choreo_agents.attention.backends.trial import error_line, find_fault
from choreo_agents.attention.backends.triton.plan import PlannedStep, PlanSizes, StepPlan
from choreo_agents.attention.backends.triton.tiles import tiles
from choreo_agents.attention.kind import AttentionKind, HeadShape
from choreo_agents.attention.layout import Layout, farthest_seen, windowed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256
"""Upper bound on the dimensions of a head."""


class TritonBackend:
    """Attention in at most four launches per layer. `TritonBackend.tried` returns it, or why it is not available.

    Args:
        dtype: Of keys, values and queries.
        device: Of keys, values and queries.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    @staticmethod
    def tried(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> TritonBackend | str:
        """Return the backend for heads of a shape, or why there is none; compiled kernels are tried out first."""
        interpreted = _check_interpreted()
        if isinstance(interpreted, str):
            return interpreted
        if dtype not in _DTYPES:
            return f"the triton backend supports float32, bfloat16 and float16, not {dtype}"
        if shape.head_dim > _WIDEST:
            return f"the triton backend supports head dimensions up to {_WIDEST}, not {shape.head_dim}"
        if not interpreted and device.type != "cuda":
            return f"the triton backend runs on GPUs, not on {device}; set TRITON_INTERPRET=1 to interpret it slowly"
        complaint = None if interpreted else _find_fault(dtype, device, shape)
        return complaint or TritonBackend(dtype, device)

    def prepare(self, layout: Layout, kind: AttentionKind) -> TritonAttention:
        return self.prepare_step(layout, (kind,))[kind]

    def prepare_step(
        self, layout: Layout, kinds: Sequence[AttentionKind], plan: StepPlan | None = None
    ) -> Mapping[AttentionKind, TritonAttention]:
        """Implement `AttentionBackend`; `plan` is one that is already on the device."""
        step = _TritonStep(layout, kinds, self, plan)
        return {kind: TritonAttention(step, kind, self) for kind in kinds}

    def plan_step(self, layout: Layout, kinds: Sequence[AttentionKind], shape: HeadShape) -> PlannedStep:
        """Implement `AttentionBackend`."""
        return PlannedStep(layout, kinds, shape, tiles(shape, self.dtype))

    def tables(self, planned: PlannedStep, sizes: PlanSizes) -> StepPlan:
        """Implement `AttentionBackend`."""
        return StepPlan(planned, self.device, sizes)

    def prepare_planned(self, planned: PlannedStep, plan: StepPlan) -> Mapping[AttentionKind, TritonAttention]:
        """Implement `AttentionBackend`."""
        return self.prepare_step(planned.layout, tuple(planned.kinds), plan)


def why_no_kernels() -> str | None:
    """Return why Triton kernels can be neither run on a GPU nor interpreted; None if they can."""
    interpreted = _check_interpreted()
    return interpreted if isinstance(interpreted, str) else None


def _check_interpreted() -> bool | str:
    """Return whether kernels are interpreted, or why there are none."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'choreo-agents[kernels]'"
    try:
        from choreo_agents.attention.backends.triton.launch import is_interpreted  # noqa: PLC0415 - an extra
    except (ImportError, OSError, RuntimeError) as error:
        return f"triton cannot be imported: {error_line(error)}"
    return is_interpreted()


@cache
def _find_fault(dtype: torch.dtype, device: torch.device, shape: HeadShape) -> str | None:
    complaint = find_fault(TritonBackend(dtype, device), shape, dtype, device)
    return complaint and f"triton: {complaint}"


class _TritonStep:
    """State of a step that all its kinds of layers share."""

    def __init__(
        self,
        layout: Layout,
        kinds: Sequence[AttentionKind],
        backend: TritonBackend,
        plan: StepPlan | None,
    ) -> None:
        self.layout, self.kinds = layout, kinds
        self._backend = backend
        self._plans: dict[HeadShape, StepPlan] = {} if plan is None else {plan.shape: plan}
        self.farthest = farthest_seen(layout) if any(kind.window is not None for kind in kinds) else 0
        self.further = 0
        """Steps since the layout was prepared."""
        self.goes_on = True
        """True until `follow` meets a step for which the layout must be prepared anew."""

    def hides(self, kind: AttentionKind) -> bool:
        """Return whether a kind's window hides slots that the layout has."""
        return kind.window is not None and self.farthest + self.further >= kind.window

    def plan(self, shape: HeadShape) -> StepPlan:
        """Return the plan for heads of a shape."""
        if shape not in self._plans:
            planned = self._backend.plan_step(self.layout, self.kinds, shape)
            self._plans[shape] = StepPlan(planned, self._backend.device)
        return self._plans[shape]

    def follow(self) -> None:
        """Advance to the next step, unless it must be prepared anew."""
        self.further += 1
        self.goes_on = bool(self.layout.own) and not any(self.hides(kind) for kind in self.kinds)
        # A plan that no layer has used yet would later be made from the first step's layout.
        self.goes_on = self.goes_on and bool(self._plans) and all(plan.follow() for plan in self._plans.values())


class TritonAttention:
    """A step's attention for layers of one kind."""

    def __init__(self, step: _TritonStep, kind: AttentionKind, backend: TritonBackend) -> None:
        self.layout = windowed(step.layout, kind.window or 0) if step.hides(kind) else step.layout
        self.kind = kind
        self._step, self._backend = step, backend
        self._further = 0

    def store(self, heads: int, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> None:
        """Implement `PreparedAttention`."""
        from choreo_agents.attention.backends.triton import launch  # noqa: PLC0415 - an extra

        launch.store(self._step.plan(HeadShape(heads, *key.shape[::2])), key, value, keys, values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Implement `PreparedAttention`."""
        from choreo_agents.attention.backends.triton import launch  # noqa: PLC0415 - an extra

        assert query.dtype == keys.dtype == values.dtype == self._backend.dtype
        assert keys.stride() == values.stride() and keys.stride(-1) == 1
        shape = HeadShape(query.shape[1], keys.shape[0], query.shape[2])
        return launch.attend(self._step.plan(shape), self.kind, query, keys, values, scale, sinks)

    def follow(self) -> bool:
        """Implement `PreparedAttention`: the first kind that is called advances the step for all kinds."""
        if self._step.further == self._further:
            self._step.follow()
        self._further += 1
        return self._step.goes_on
