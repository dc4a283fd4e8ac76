"""Engines that chat models of one process share."""

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
class KeptEngines:
    """Those that a chat model has loaded, which it and all its copies keep: some are made for one call each."""

    _kept: dict[str, Engine] = field(default_factory=dict)

    def over(self, model: str, options: Mapping[str, Any]) -> Engine:
        """The engine over a model. Arguments, and what it raises, are those of `shared_engine`."""
        key = _key(model, options)
        if key not in self._kept:
            self._kept[key] = shared_engine(model, options)
        return self._kept[key]

    def __deepcopy__(self, memo: Any) -> KeptEngines:
        return self

    def __reduce__(self) -> Any:
        """In another process engines are loaded anew."""
        return KeptEngines, ()


def shared_engine(model: str, options: Mapping[str, Any]) -> Engine:
    """The engine over a model: loaded once, for as long as anybody uses it.

    Args:
        model: What `Engine.load` takes.
        options: Its other arguments.

    Raises:
        ModelNotFoundError: There is no such model. UnsupportedModelError: It cannot be served.
    """
    key = _key(model, options)
    with _LOCK:
        found = _ENGINES.get(key)
        if found is None:
            found = _ENGINES[key] = Engine.load(model, **options)
            owner = found.admin
            assert owner is not None, "it was loaded, and is no tenant's"
            finalize(found, owner.close)
        return found


def _key(model: str, options: Mapping[str, Any]) -> str:
    """Of an engine of this process: one that was loaded before it was forked is its parent's."""
    return f"{os.getpid()} {model!r} {sorted(options.items(), key=lambda each: each[0])!r}"
