"""The only module that uses LangGraph's private modules, keys and attributes, which a new release may change."""

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
"""First LangGraph whose `DeltaChannel`, in beta, reads correctly after forks and overwritten values."""
_UPDATES_APART = 5
"""Updates between full snapshots of a channel. Fewer make longer checkpoints; more make a turn slower, as it reads all
updates since the last snapshot, and with SQLite the whole checkpoints around them."""
T = TypeVar("T")
SENDS = TASKS
"""The channel of `Send`s; an update may write it, too."""
_HIDDEN = "__pregel_choreo"
"""Key of our configurable value. LangGraph neither stores nor shows keys that start with `__pregel`."""


# Declared and compiled graphs


def growing(merge: Callable[[Any, Any], Any], merge_all: Callable[[Any, Sequence[Any]], Any]) -> Any:
    """Return the reducer of a state channel, such that a checkpoint stores only what is new in it.

    Under an older LangGraph every checkpoint stores the whole value.

    Args:
        merge: Merges one update into the value.
        merge_all: Merges several, with the same result as one after the other.
    """
    if tuple(map(int, re.findall(r"\d+", version("langgraph"))[:3])) < _GROWS_FROM:
        return merge
    return DeltaChannel(merge_all, snapshot_frequency=_UPDATES_APART)


def merges_by(channel: Any, *merging: Callable[..., Any]) -> bool:
    """Return whether a channel merges updates by one of these functions."""
    return any(getattr(channel, name, None) in merging for name in ("operator", "reducer"))


def is_cached(builder: StateGraph[Any, Any, Any, Any], node: str) -> bool:
    """Return whether LangGraph caches a node, by its own policy or its graph's."""
    return (builder.nodes[node].cache_policy or builder._node_defaults.cache_policy) is not None


class AroundNode(RunnableCallable):
    """A node wrapped in functions of ours; `find_runnable` looks through it.

    Args:
        node: The node.
        run: Runs it, given the input and the config.
        arun: The same, awaited.
    """

    def __init__(self, node: Any, run: Callable[..., Any], arun: Callable[..., Any]) -> None:
        super().__init__(run, arun, name=node.get_name(), trace=False, recurse=False)
        self.node = node


def stops_of(compiled: Any) -> dict[str, Any]:
    """Return a graph's compile arguments, except checkpointer, cache and debug: interrupts, store and name."""
    stops = {f"interrupt_{when}": getattr(compiled, f"interrupt_{when}_nodes") for when in ("before", "after")}
    listed = {name: nodes if isinstance(nodes, str) else list(nodes) for name, nodes in stops.items()}
    return {**listed, "store": compiled.store, "name": compiled.name}


def strict_serializer(builder: StateGraph[Any, Any, Any, Any] | None) -> JsonPlusSerializer:
    """Return a serializer that reads back plain values, messages and the graph's own schemas: no pickle, no other
    types."""
    schemas: list[Any] = [] if builder is None else [*builder.schemas]
    allowed = build_serde_allowlist(schemas=schemas, channels=None if builder is None else builder.channels)
    return JsonPlusSerializer(allowed_msgpack_modules=[key for key in allowed if len(key) == 2])


def relabelled(compiled: Any, kind: type[T]) -> T:
    """Return a compiled graph as an instance of our class: `StateGraph.compile` hard-codes the class of its result."""
    compiled.__class__ = kind
    assert isinstance(compiled, kind)
    return compiled


# A node's config: where it runs


def nodes_behind(config: RunnableConfig, depth: int) -> tuple[str, ...]:
    """Return the nodes in LangGraph's name of this config's task, after the first `depth` parts."""
    parts, graphs = task_parts_of(config), _configurable(config).get("checkpoint_map") or {}
    # If one task calls several graphs, LangGraph adds a number as a part for the second and later ones. A node's name
    # may be a number, too: then the parts before it name a graph.
    places = [at for at in range(depth, len(parts)) if not parts[at].isdigit() or "|".join(parts[:at]) in graphs]
    return tuple(parts[at].partition(":")[0] for at in places)


def branch_of(config: RunnableConfig) -> int:
    """Return the index of a node's `Send` branch; 0 if it was not sent."""
    path: Sequence[Any] = _metadata(config).get("langgraph_path") or ()
    branch = path[1] if len(path) > 1 else None
    return branch if isinstance(branch, int) else 0


def place_in_superstep(config: RunnableConfig) -> str:
    """Return a node's task within its superstep: the same again in every run; empty outside LangGraph."""
    path: Sequence[Any] = _metadata(config).get("langgraph_path") or ()
    return repr((*path,)) if path else ""


def superstep_of(config: RunnableConfig) -> int:
    """Return LangGraph's number of a node's superstep."""
    return int(_metadata(config).get("langgraph_step", 0))


def run_step_of(config: RunnableConfig) -> str:
    """Return the run and superstep of a node, equal only for nodes of one superstep; empty if unknown."""
    execution = getattr(_configurable(config).get("__pregel_runtime"), "execution_info", None)
    checkpoint = getattr(execution, "checkpoint_id", None)
    return f"{checkpoint} {_metadata(config).get('langgraph_step', '')}" if checkpoint else ""


def called_with(graph: Any, config: RunnableConfig | None) -> RunnableConfig:
    """Return the config that a stock graph runs with if it is called with this one, here."""
    return ensure_config(graph.config, config)


def is_nested(config: RunnableConfig) -> bool:
    """Return whether a graph that is called with this config runs in a node of another graph."""
    return callable(task_token_of(config))


def require_outermost(config: RunnableConfig) -> None:
    """Raise `InvalidRequestError` if a run outside of any node claims a task's id: its checkpoints would go to that
    task."""
    if not is_nested(config) and "__pregel_task_id" in _configurable(config):
        raise InvalidRequestError("a run is no task of another's: leave '__pregel_task_id' out of its configurable")


def task_path_of(config: RunnableConfig) -> str:
    """Return LangGraph's task, behind those of the graphs around it: `team:1|judge:2`; empty outside LangGraph."""
    return str(_metadata(config).get("langgraph_checkpoint_ns", ""))


def task_parts_of(config: RunnableConfig) -> list[str]:
    """Return the parts of that path: tasks, and LangGraph's counters for several graphs of one task."""
    return [part for part in task_path_of(config).split("|") if part]


def task_token_of(config: RunnableConfig) -> Any:
    """Return an object that LangGraph makes anew whenever it runs a task; None outside LangGraph."""
    return _configurable(config).get("__pregel_read")


# A run's state, threads and checkpoints


def channel_values(config: RunnableConfig, names: Sequence[str], *, fresh: bool = False) -> dict[str, Any]:
    """Return the values of existing channels before a node's superstep; empty outside LangGraph. `fresh`: with the
    node's own writes."""
    read: Any = task_token_of(config)
    values: dict[str, Any] = {}
    for name in names if callable(read) else ():
        with suppress(KeyError):
            values |= read([name], fresh)
    return values


def overwritten(value: Any) -> tuple[bool, Any]:
    """Return whether an update, in any of LangGraph's forms, replaces the channel's value, and the new value or
    update."""
    is_overwrite, replacement = _get_overwrite(value)
    return is_overwrite, replacement if is_overwrite else value


def saved_state_of(graph: Any, config: RunnableConfig) -> RunnableConfig | None:
    """Return the config with which `get_state` finds the state before a run; None: no state is kept."""
    configurable = _configurable(config)
    if saver_of(config, graph) is None or "thread_id" not in configurable:
        return None
    # Resolve it as an outermost run does: a subgraph's checkpoint is not its state, and a checkpoint map counts only
    # for the namespace that is named. Clients can write both, and must not get another state compared.
    namespace = configurable.get("checkpoint_ns")
    at: dict[str, Any] = {"checkpoint_ns": ""}
    if namespace:
        namespace, at["checkpoint_id"] = "", None
    mapped = configurable.get("checkpoint_map") or {}
    if namespace in mapped:
        at["checkpoint_id"] = mapped[namespace]
    return {**config, "configurable": {**configurable, **at}}


def thread_of(config: RunnableConfig) -> str | None:
    """Return the thread that keeps a run's state; None: no thread is named."""
    thread = _configurable(config).get("thread_id")
    return None if thread is None else str(thread)


def at_thread(config: RunnableConfig | None, thread: str) -> RunnableConfig:
    """Return a config that names a thread, without a checkpoint of it."""
    base: RunnableConfig = config or {}
    options = {name: value for name, value in _configurable(base).items() if not name.startswith("checkpoint_")}
    return {**base, "configurable": {**options, "thread_id": thread}}


def saver_of(config: RunnableConfig, compiled: Any = None) -> Any:
    """Return the checkpointer of a node's run, or of a compiled graph called with this config; None: there is none."""
    saver = _configurable(config).get("__pregel_checkpointer") or getattr(compiled, "checkpointer", None)
    return saver if hasattr(saver, "get_tuple") else None


def store_of(config: RunnableConfig) -> BaseStore | None:
    """Return the store of a run's nodes, given to the graph or by a platform."""
    return getattr(_configurable(config).get("__pregel_runtime"), "store", None)


def saved_metadata(saver: Any, thread: str | None) -> dict[str, Any] | None:
    """Return the metadata of a thread's last checkpoint; None: there is none."""
    return None if saver is None else _metadata_of(saver.get_tuple(_at(thread)))


async def asaved_metadata(saver: Any, thread: str | None) -> dict[str, Any] | None:
    """Return the same with an async checkpointer."""
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
            f"the checkpointer {type(saver).__name__} does not implement delete_thread(): nothing was deleted"
        ) from None


async def adelete_thread(saver: Any, thread: str) -> None:
    """Delete the same with an async checkpointer."""
    if saver is not None:
        await _awaited(saver.adelete_thread, partial(delete_thread, saver), thread)


async def _awaited(call: Callable[[Any], Awaitable[Any]], sync_call: Callable[[Any], Any], argument: Any) -> Any:
    """Await a saver's async method; if it has none, run its sync method in a thread."""
    try:
        return await call(argument)
    except NotImplementedError:
        return await asyncio.to_thread(sync_call, argument)


def with_hidden(config: RunnableConfig | None, value: Any) -> RunnableConfig:
    """Return a config that carries a value of ours to every node, and into nothing that is stored or shown."""
    base: RunnableConfig = config or {}
    return {**base, "configurable": {**(base.get("configurable") or {}), _HIDDEN: value}}


def hidden_in(config: RunnableConfig) -> Any:
    """Return the value from `with_hidden`; None if a config carries none."""
    return _configurable(config).get(_HIDDEN)


def _at(thread: str | None) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}


def _metadata_of(saved: Any) -> dict[str, Any] | None:
    return None if saved is None else dict(saved.metadata or {})


def _metadata(config: RunnableConfig) -> Mapping[str, Any]:
    return config.get("metadata") or {}


def _configurable(config: RunnableConfig) -> Mapping[str, Any]:
    return config.get("configurable") or {}
