"""Import graphs by the names that commands take: `module:graph`."""

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
    """Import and return the graph `module:name`; if it is a function, call it without arguments.

    The current folder is searched for modules first, but only while the graph is loaded: its files must not shadow
    modules that are imported later. Run the graph in a `current_folder` block if it imports more modules of its own.

    Raises:
        InvalidRequestError: There is no such graph.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise InvalidRequestError(f"a graph must be named as module:graph, not {target!r}")
    with current_folder():
        graph = _import_object(module_name.removesuffix(".py").replace("/", "."), name)
    if not isinstance(graph, ChoreoGraph | CompiledChoreoGraph):
        raise InvalidRequestError(f"{target!r} is neither a ChoreoGraph nor a factory of one: it is {graph!r}")
    return graph


def _import_object(module_name: str, name: str) -> Any:
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InvalidRequestError(f"cannot import the module {module_name!r}: {error}") from error
    for part in name.split("."):
        value = getattr(value, part, None)
    if not callable(value) or isinstance(value, ChoreoGraph | CompiledChoreoGraph):
        return value
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise InvalidRequestError(f"'{module_name}:{name}' cannot be called without arguments: {error}") from error
    return value()


@contextmanager
def current_folder() -> Iterator[None]:
    """Search the current folder for modules first, inside the block."""
    folder = str(Path.cwd())
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the module itself may have removed it
            sys.path.remove(folder)


def load_graph(target: str) -> ChoreoGraph:
    """Return the graph `module:name` uncompiled; see `named_graph`."""
    graph = named_graph(target)
    return cast("ChoreoGraph", graph.builder) if isinstance(graph, CompiledChoreoGraph) else graph
