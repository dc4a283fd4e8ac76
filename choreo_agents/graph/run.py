"""Where in a LangGraph run a node's call stands."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig

T = TypeVar("T")


Replay = Mapping[tuple[str, int, int], tuple[int, ...]]
"""Tokens by (node, superstep, branch): a run given one decodes exactly these, at the full price of every step."""


@dataclass(frozen=True)
class RunPlace:
    """Names one execution of one node; the same again if LangGraph reruns it."""

    node: str
    thread: str
    task: str
    """LangGraph's task, with the path of its graph if that is a subgraph."""
    branch: int
    seed: int | None
    """Run seed, from `config["configurable"]["seed"]`."""
    replay: Replay | None
    """Tokens to force, from `config["configurable"]["replay"]`."""

    @classmethod
    def of(cls, config: RunnableConfig, default_node: str) -> RunPlace:
        """Read it from a node's config; outside LangGraph all of it is default."""
        metadata = config.get("metadata") or {}
        configurable = config.get("configurable") or {}
        path: Sequence[Any] = metadata.get("langgraph_path") or ()
        branch = path[1] if len(path) > 1 else None
        return cls(
            node=str(metadata.get("langgraph_node", default_node)),
            thread=str(configurable.get("thread_id", "")),
            task=str(metadata.get("langgraph_checkpoint_ns", "")),
            branch=branch if isinstance(branch, int) else 0,
            seed=configurable.get("seed"),
            replay=configurable.get("replay"),
        )

    def call_seed(self, engine_seed: int, superstep: int, call: int) -> int:
        """Seed of a node's `call`-th decode: the same in every run of the same graph with the same run seed."""
        run_seed = engine_seed if self.seed is None else self.seed
        place = f"{run_seed} {self.node} {superstep} {self.branch} {call}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")

    def call_name(self, call: int) -> str | None:
        """Names a node's `call`-th decode, so that a rerun finds its answer; None outside LangGraph."""
        return f"{self.thread} {self.task} {call}" if self.task else None


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run async work from sync code: here, or on a thread of its own if this one already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def target() -> None:
        try:
            done.set_result(context.run(asyncio.run, work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=target, name="choreo-sync-bridge", daemon=True).start()
    return done.result()
