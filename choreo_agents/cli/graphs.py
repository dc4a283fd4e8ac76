"""Graphs by name, as commands take them: `module:graph`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph import ChoreoGraph, CompiledChoreoGraph


def named_graph(target: str) -> ChoreoGraph | CompiledChoreoGraph:
    """The graph that `module:name` is, or makes when it is called without arguments: the module's code runs for that.

    Modules are looked for in the current folder first, while the graph is loaded and no longer: what lies there must
    not take the place of what is imported later. A graph that runs may import more of what is its own: let it run in a
    `current_folder` block.

    Raises:
        InvalidRequestError: There is none.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise InvalidRequestError(f"name the graph as module:graph, not {target!r}")
    with current_folder():
        named = _named(module_name.removesuffix(".py").replace("/", "."), name)
    if not isinstance(named, ChoreoGraph | CompiledChoreoGraph):
        raise InvalidRequestError(f"{target!r} is no ChoreoGraph, and does not make one: it is {named!r}")
    return named


def _named(module_name: str, name: str) -> Any:
    try:
        named: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidRequestError(f"there is no module {module_name!r}: {error}") from error
    for part in name.split("."):
        named = getattr(named, part, None)
    if not callable(named) or isinstance(named, ChoreoGraph | CompiledChoreoGraph):
        return named
    try:
        inspect.signature(named).bind()
    except TypeError as error:
        raise InvalidRequestError(f"'{module_name}:{name}' cannot be called without arguments: {error}") from error
    return named()


@contextmanager
def current_folder() -> Iterator[None]:
    """A block in which modules are looked for there first."""
    here = str(Path.cwd())
    if here in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module itself may have taken it away
            sys.path.remove(here)


def load_graph(target: str) -> ChoreoGraph:
    """The same, not compiled."""
    named = named_graph(target)
    return cast("ChoreoGraph", named.builder) if isinstance(named, CompiledChoreoGraph) else named
