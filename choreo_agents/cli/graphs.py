"""Graphs by name, as commands take them: `module:graph`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph import ChoreoGraph, CompiledChoreoGraph


def named_graph(target: str) -> ChoreoGraph | CompiledChoreoGraph:
    """The graph that `module:name` is, or makes when it is called without arguments.

    Raises:
        InvalidRequestError: There is none.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise InvalidRequestError(f"name the graph as module:graph, not {target!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name.removesuffix(".py").replace("/", "."))
    except ModuleNotFoundError as error:
        raise InvalidRequestError(f"there is no module {module_name!r}: {error}") from error
    named: Any = module
    for part in name.split("."):
        named = getattr(named, part, None)
    if callable(named) and not isinstance(named, ChoreoGraph | CompiledChoreoGraph):
        named = named()
    if not isinstance(named, ChoreoGraph | CompiledChoreoGraph):
        raise InvalidRequestError(f"{target!r} is no ChoreoGraph, and does not make one: it is {named!r}")
    return named


def load_graph(target: str) -> ChoreoGraph:
    """The same, not compiled."""
    named = named_graph(target)
    graph: Any = named.builder if isinstance(named, CompiledChoreoGraph) else named
    assert isinstance(graph, ChoreoGraph)
    return graph
