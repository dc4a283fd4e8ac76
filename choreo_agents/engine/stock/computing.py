"""What computes an engine's steps, in words."""

from __future__ import annotations

from typing import NamedTuple

from choreo_agents.attention.backends import told
from choreo_agents.models.loader import LoadedModel
from choreo_agents.runtime.executor import Executor


class Computing(NamedTuple):
    """See the fields of the same names in `EngineStats`."""

    backend: str
    backend_why: str
    forward: str
    graphs: int = 0
    graphs_why: str = ""
    steps_ahead: int = 0


def computing(model: LoadedModel, executor: Executor) -> Computing:
    """What computes here, now."""
    passes, backend = executor.passes, executor.backend
    return Computing(
        *told(backend), model.computed_with(backend), passes.captured, passes.why, executor.forward.steps_ahead
    )
