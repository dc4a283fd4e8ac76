"""What we know of LangGraph that it does not promise: its private modules, keys and attributes stand here alone.

A new LangGraph that breaks us breaks this file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph._internal._config import ensure_config
from langgraph._internal._constants import TASKS
from langgraph._internal._runnable import RunnableCallable
from langgraph._internal._serde import build_serde_allowlist
from langgraph.channels import DeltaChannel
from langgraph.channels.binop import _get_overwrite
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import StateGraph
from langgraph.store.base import BaseStore

from choreo_agents.errors import InvalidRequestError

_GROWS_FROM = (1, 2, 20)
"""Since when the `DeltaChannel` of LangGraph, in beta, reads after forks and overwritten values what was written."""
_UPDATES_APART = 20
"""Updates of a channel after which a checkpoint has all of it. Fewer make longer checkpoints, more make a thread that
goes on slower: it reads back all since then."""
T = TypeVar("T")
SENDS = TASKS
"""The channel of what is sent: an update may write it, too."""
_HIDDEN = "__pregel_choreo"
"""LangGraph leaves configurable values whose names start with `__pregel` out of what it stores and shows."""


# A graph as it is declared and compiled


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


# Where a node runs: of the config that it gets


def nodes_behind(config: RunnableConfig, depth: int) -> tuple[str, ...]:
    """The nodes that LangGraph names the task of this config by, behind so many parts of that name."""
    parts, graphs = task_parts_of(config), _configurable(config).get("checkpoint_map") or {}
    # Of several graphs that one task has called, the second and those after it have their number there. A node may be
    # called by a number, too: then the graph that it is of is named by what stands before it.
    return tuple(
        part.partition(":")[0]
        for at, part in enumerate(parts)
        if at >= depth and (not part.isdigit() or "|".join(parts[:at]) in graphs)
    )


def branch_of(config: RunnableConfig) -> int:
    """Which of several `Send` branches a node is; 0 if it was not sent."""
    path: Sequence[Any] = _metadata(config).get("langgraph_path") or ()
    branch = path[1] if len(path) > 1 else None
    return branch if isinstance(branch, int) else 0


def place_in_superstep(config: RunnableConfig) -> str:
    """Which task of its superstep a node runs in: the same again in every run; empty outside LangGraph."""
    path: Sequence[Any] = _metadata(config).get("langgraph_path") or ()
    return repr((*path,)) if path else ""


def superstep_of(config: RunnableConfig) -> int:
    """LangGraph's number of the superstep that a node runs in."""
    return int(_metadata(config).get("langgraph_step", 0))


def run_step_of(config: RunnableConfig) -> str:
    """Which superstep of which run a node runs in: the same for siblings, and for them alone; empty if nobody knows."""
    checkpoint = getattr(_execution(config), "checkpoint_id", None)
    return f"{checkpoint} {_metadata(config).get('langgraph_step', '')}" if checkpoint else ""


def called_with(graph: Any, config: RunnableConfig | None) -> RunnableConfig:
    """The config that a graph of LangGraph's runs with, if it is called with this one, here."""
    return ensure_config(graph.config, config)


def is_nested(config: RunnableConfig) -> bool:
    """Whether a graph that is called with this config runs in a node of another."""
    return callable(task_token_of(config))


def require_outermost(config: RunnableConfig) -> None:
    """Raise `InvalidRequestError` if a run that no node has called says that it is a task's: it would be kept there."""
    if not is_nested(config) and "__pregel_task_id" in _configurable(config):
        raise InvalidRequestError("a run is no task of another's: leave '__pregel_task_id' out of its configurable")


def task_path_of(config: RunnableConfig) -> str:
    """LangGraph's task, behind those of the graphs around it: `team:1|judge:2`; empty outside LangGraph."""
    return str(_metadata(config).get("langgraph_checkpoint_ns", ""))


def task_parts_of(config: RunnableConfig) -> list[str]:
    """The parts of that: tasks, and what LangGraph counts the graphs of one task by."""
    return [part for part in task_path_of(config).split("|") if part]


def task_token_of(config: RunnableConfig) -> Any:
    """An object that LangGraph makes anew whenever it runs a task; None outside LangGraph."""
    return _configurable(config).get("__pregel_read")


# The run's state


def channel_values(config: RunnableConfig, names: Sequence[str], *, fresh: bool = False) -> dict[str, Any]:
    """The values before a node's superstep of those channels that the graph has; nothing outside LangGraph. `fresh`:
    with what the node has written."""
    read: Any = task_token_of(config)
    values: dict[str, Any] = {}
    for name in names if callable(read) else ():
        with suppress(KeyError):
            values |= read([name], fresh)
    return values


def overwritten(value: Any) -> tuple[bool, Any]:
    """Whether an update in any of LangGraph's forms replaces its channel, in place of being merged, and by what."""
    is_overwrite, given = _get_overwrite(value)
    return is_overwrite, given if is_overwrite else value


def saved_state_of(graph: Any, config: RunnableConfig) -> RunnableConfig | None:
    """What `get_state` of a graph that is called with this config asks for; None: nothing is kept."""
    configurable = _configurable(config)
    if saver_of(config, graph) is None or "thread_id" not in configurable:
        return None
    # As a run that is no other's node takes it: what stands in a subgraph is not its state, and what a map says counts
    # only under the namespace that is named. Clients write both, and must not have another state looked at.
    namespace = configurable.get("checkpoint_ns")
    at: dict[str, Any] = {"checkpoint_ns": ""}
    if namespace:
        namespace, at["checkpoint_id"] = "", None
    mapped = configurable.get("checkpoint_map") or {}
    if namespace in mapped:
        at["checkpoint_id"] = mapped[namespace]
    return {**config, "configurable": {**configurable, **at}}


async def pending_writes(config: RunnableConfig) -> list[tuple[str, str, Any]]:
    """What tasks of an interrupted superstep wrote, as (task, channel, value): it waits in the checkpoint."""
    configurable = _configurable(config)
    saver, info = saver_of(config), _execution(config)
    if saver is None or info is None:
        return []
    around = task_path_of(config).rpartition("|")[0]
    at = {"thread_id": configurable.get("thread_id"), "checkpoint_ns": around, "checkpoint_id": info.checkpoint_id}
    where = RunnableConfig(configurable=at)
    saved = await _awaited(saver.aget_tuple, saver.get_tuple, where)
    return list((saved.pending_writes if saved else None) or [])


def thread_of(config: RunnableConfig) -> str | None:
    """The thread that a run's state is kept in; None: in none."""
    thread = _configurable(config).get("thread_id")
    return None if thread is None else str(thread)


def at_thread(config: RunnableConfig | None, thread: str) -> RunnableConfig:
    """A config that names a thread, and nothing in it."""
    given: RunnableConfig = config or {}
    kept = {name: value for name, value in _configurable(given).items() if not name.startswith("checkpoint_")}
    return {**given, "configurable": {**kept, "thread_id": thread}}


def saver_of(config: RunnableConfig, compiled: Any = None) -> Any:
    """What keeps the state of the run that a node stands in, or those of a compiled graph's threads, which is called
    with this config; None: nothing does."""
    found = _configurable(config).get("__pregel_checkpointer") or getattr(compiled, "checkpointer", None)
    return found if hasattr(found, "get_tuple") else None


def store_of(config: RunnableConfig) -> BaseStore | None:
    """The store that a run's nodes have, as the graph was compiled with or a platform brings it."""
    return getattr(_configurable(config).get("__pregel_runtime"), "store", None)


def saved_metadata(saver: Any, thread: str | None) -> dict[str, Any] | None:
    """What the last checkpoint of a thread says of itself; None: there is none."""
    return None if saver is None else _metadata_of(saver.get_tuple(_at(thread)))


async def asaved_metadata(saver: Any, thread: str | None) -> dict[str, Any] | None:
    """The same."""
    return None if saver is None else _metadata_of(await _awaited(saver.aget_tuple, saver.get_tuple, _at(thread)))


def delete_thread(saver: Any, thread: str) -> None:
    """Delete all checkpoints of a thread, those of subgraphs included.

    Raises:
        InvalidRequestError: The checkpointer cannot.
    """
    try:
        if saver is not None:
            saver.delete_thread(thread)
    except NotImplementedError:
        raise InvalidRequestError(
            f"the checkpointer {type(saver).__name__} does not say how a thread is deleted: nothing was forgotten"
        ) from None


async def adelete_thread(saver: Any, thread: str) -> None:
    """The same."""
    if saver is not None:
        await _awaited(saver.adelete_thread, partial(delete_thread, saver), thread)


async def _awaited(asked: Callable[[Any], Awaitable[Any]], otherwise: Callable[[Any], Any], about: Any) -> Any:
    """Return what a saver answers; if it is sync only, what it says when it is called otherwise, on a thread."""
    try:
        return await asked(about)
    except NotImplementedError:
        return await asyncio.to_thread(otherwise, about)


def with_hidden(config: RunnableConfig | None, value: Any) -> RunnableConfig:
    """A config that carries a value of ours to every node, and into nothing that is stored or shown."""
    given: RunnableConfig = config or {}
    return {**given, "configurable": {**(given.get("configurable") or {}), _HIDDEN: value}}


def hidden_in(config: RunnableConfig) -> Any:
    """That value; None if a config carries none."""
    return _configurable(config).get(_HIDDEN)


def _at(thread: str | None) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}


def _metadata_of(saved: Any) -> dict[str, Any] | None:
    return None if saved is None else dict(saved.metadata or {})


def _metadata(config: RunnableConfig) -> Mapping[str, Any]:
    return config.get("metadata") or {}


def _configurable(config: RunnableConfig) -> Mapping[str, Any]:
    return config.get("configurable") or {}


def _execution(config: RunnableConfig) -> Any:
    return getattr(_configurable(config).get("__pregel_runtime"), "execution_info", None)
