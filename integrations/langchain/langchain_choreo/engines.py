"""Engines that the chat models of a process share."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, finalize

from choreo_agents import Engine

_LOCK = threading.Lock()
_ENGINES: WeakValueDictionary[str, Engine] = WeakValueDictionary()


@dataclass
class EngineCache:
    """Engines that a chat model has loaded, kept alive by it and its copies, which LangChain makes for single calls."""

    _engines: dict[str, Engine] = field(default_factory=dict)

    def get(self, model: str, options: Mapping[str, Any]) -> Engine:
        """Return the engine of a model, loading it on first use; arguments and errors are those of `shared_engine`."""
        key = _engine_key(model, options)
        if key not in self._engines:
            self._engines[key] = shared_engine(model, options)
        return self._engines[key]

    def __deepcopy__(self, memo: Any) -> EngineCache:
        return self

    def __reduce__(self) -> Any:
        """Pickle without engines: another process loads its own."""
        return EngineCache, ()


def shared_engine(model: str, options: Mapping[str, Any]) -> Engine:
    """Return the engine of a model, which is loaded once and closed when nobody references it any more.

    Args:
        model: Argument of `Engine.load`.
        options: Other arguments of `Engine.load`.

    Raises:
        ModelNotFoundError: There is no such model.
        UnsupportedModelError: The model cannot be served.
    """
    key = _engine_key(model, options)
    with _LOCK:
        engine = _ENGINES.get(key)
        if engine is None:
            engine = _ENGINES[key] = Engine.load(model, **options)
            owner = engine.admin
            assert owner is not None, "it was loaded, and is no tenant's"
            finalize(engine, owner.close)
        return engine


def _engine_key(model: str, options: Mapping[str, Any]) -> str:
    """Return the key of an engine; it has the process id, because a forked process must not use its parent's engine."""
    return f"{os.getpid()} {model!r} {sorted(options.items(), key=lambda option: option[0])!r}"
