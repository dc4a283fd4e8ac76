"""Fronts over engines in this process, in the place of an engine."""

from __future__ import annotations

from typing import Any

from choreo_agents import Engine
from choreo_agents.engine import engine_over
from choreo_agents.models import LoadedModel, load_model

_FRONTS = ("seed", "salt", "quota", "sink")


def load_elsewhere(model: Any = "embedded", engines: int = 2, **options: Any) -> Engine:
    """What `Engine.load` takes, of each of several engines, and a front over them; closing it closes them, too."""
    own = {name: options.pop(name) for name in _FRONTS if name in options}
    loading = {name: options.pop(name) for name in ("device", "dtype", "prepacked", "chat") if name in options}
    loaded = model if isinstance(model, LoadedModel) else load_model(model, **loading)
    far = [Engine.load(loaded, **options) for _ in range(engines)]
    front = engine_over([engine.owner.server(f"engine {n}") for n, engine in enumerate(far)], loaded, **own)
    close = front.close

    def close_all() -> None:
        close()
        for engine in far:
            engine.owner.check() if hasattr(engine.owner, "check") else engine.check()
            engine.close()

    front.close = close_all  # type: ignore[method-assign]
    return front
