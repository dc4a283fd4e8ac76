"""A graph as it is declared and compiled: its policies, channels, nodes and parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from langgraph._internal._runnable import RunnableCallable
from langgraph._internal._serde import build_serde_allowlist
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import StateGraph

_GROWS_FROM = (1, 2, 20)
"""Since when the `DeltaChannel` of LangGraph, in beta, reads after forks and overwritten values what was written."""
_UPDATES_APART = 20
"""Updates of a channel after which a checkpoint has all of it. Fewer make longer checkpoints, more make a thread that
goes on slower: it reads back all since then."""
T = TypeVar("T")


def growing(merge: Callable[[Any, Any], Any], merge_all: Callable[[Any, Sequence[Any]], Any]) -> Any:
    """What says of a channel of a state how its updates are merged, so that a checkpoint has what is new in it alone.

    Under an older LangGraph every checkpoint has all of it.

    Args:
        merge: The value with one update.
        merge_all: With several, the same as one after the other.
    """
    if tuple(map(int, re.findall(r"\d+", version("langgraph"))[:3])) < _GROWS_FROM:
        return merge
    return DeltaChannel(merge_all, snapshot_frequency=_UPDATES_APART)


def merges_by(channel: Any, *merging: Callable[..., Any]) -> bool:
    """Whether a channel merges updates by one of these functions."""
    return any(getattr(channel, name, None) in merging for name in ("operator", "reducer"))


def is_cached(builder: StateGraph[Any, Any, Any, Any], node: str) -> bool:
    """Return whether LangGraph caches a node, by its own policy or its graph's."""
    return (builder.nodes[node].cache_policy or builder._node_defaults.cache_policy) is not None


class AroundNode(RunnableCallable):
    """A node of a graph inside of functions of ours. What a node is, and holds, is seen through it.

    Args:
        node: The node.
        run: Runs it, given the input and the config.
        arun: The same, awaited.
    """

    def __init__(self, node: Any, run: Callable[..., Any], arun: Callable[..., Any]) -> None:
        super().__init__(run, arun, name=node.get_name(), trace=False, recurse=False)
        self.node = node


def stops_of(compiled: Any) -> dict[str, Any]:
    """What a graph was compiled with beside its checkpointer, its cache and its debugging: where it stops, its store
    and its name."""
    stops = {f"interrupt_{when}": getattr(compiled, f"interrupt_{when}_nodes") for when in ("before", "after")}
    listed = {name: nodes if isinstance(nodes, str) else list(nodes) for name, nodes in stops.items()}
    return {**listed, "store": compiled.store, "name": compiled.name}


def strict_serializer(builder: StateGraph[Any, Any, Any, Any] | None) -> JsonPlusSerializer:
    """Reads back plain values, messages, and what a graph's own schemas are made of: no pickle, no other types."""
    schemas: list[Any] = [] if builder is None else [*builder.schemas]
    allowed = build_serde_allowlist(schemas=schemas, channels=None if builder is None else builder.channels)
    return JsonPlusSerializer(allowed_msgpack_modules=[key for key in allowed if len(key) == 2])


def relabelled(compiled: Any, kind: type[T]) -> T:
    """A compiled graph as one of a class of ours: `StateGraph.compile` names the class of what it makes."""
    compiled.__class__ = kind
    assert isinstance(compiled, kind)
    return compiled
