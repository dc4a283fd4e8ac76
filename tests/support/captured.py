"""Passes that are captured as on a GPU, on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from choreo_agents import Engine, Memory, Scheduling
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.executor import Executor


class Recorder:
    """Captures as a GPU does: what it replays knows nothing of the step but what stands in memory."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        out = torch.empty_like(run())

        def replay() -> None:
            self.replayed += 1
            out.copy_(run())

        return replay, out


def record(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Have every executor capture its passes by one recorder."""
    made, init = Recorder(), Executor.__init__

    def recording(self: Executor, *given: Any, **options: Any) -> None:
        init(self, *given, **options)
        self.passes._capture = made if options.get("graphs", True) else None

    monkeypatch.setattr(Executor, "__init__", recording)
    return made


def engine_of(model: LoadedModel, backend: str = "triton", *, sink: Any = None, **options: Any) -> Engine:
    settings: dict[str, Any] = {"memory": Memory(kv_budget_bytes=1 << 23), "scheduling": Scheduling(**options)}
    return Engine.load(model, backend=backend, sink=sink or (lambda _: None), **settings)  # type: ignore[arg-type]
