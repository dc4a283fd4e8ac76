"""Leases of a thread on the KV of its runs: until the thread is deleted, or idle for `thread_ttl_s`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine, EphemeralRun
from choreo_agents.graph.durable.thread_log import RunLineage, lineage_of
from choreo_agents.graph.langgraph_internals import saver_of, thread_of
from choreo_agents.graph.run_context import RunContext
from choreo_agents.graph.state import HandleEntry, handles_of
from choreo_agents.kv.handle import MessageHandle


def thread_in(config: RunnableConfig, graph: Any = None) -> str | EphemeralRun:
    """Return the thread that leases KV of a graph's call, or of a node's run: that of the outermost Choreo graph.

    In a stock LangGraph graph the end of a run is unknown: without a checkpointer each call has leases of its own.
    """
    if (outer := RunContext.of(config).thread) is not None:
        return outer
    thread = thread_of(config)
    return EphemeralRun(is_whole=graph is not None) if thread is None or saver_of(config, graph) is None else thread


@asynccontextmanager
async def lease_to_thread(
    engine: Engine, config: RunnableConfig, entries: Sequence[HandleEntry], answers: Sequence[MessageHandle]
) -> AsyncGenerator[RunLineage | None]:
    """Lease new messages, and all that exist of these entries and answers, to the thread of a node's run.

    A fork so leases what it inherits, and each model's engine its own KV.

    Yields:
        The thread's lineage; missing entries were restored from it.
    """
    thread = thread_in(config)
    with engine.threads.used(thread) as leases, engine.threads.speaking(thread) as scope:
        lineage = await lineage_of(engine, config, thread, scope, leases.noted)
        if lineage is not None:
            await lineage.restore(all_handles(entries))
        engine.threads.hold([*all_handles(entries), *answers], scope)
        yield lineage


def all_handles(entries: Iterable[HandleEntry]) -> Iterator[MessageHandle]:
    """Yield all handles in entries, of all models."""
    for entry in entries:
        yield from handles_of(entry)
        for plain in (entry.get("prompt"), entry.get("thoughts")):
            if plain is not None:
                yield MessageHandle.model_validate(plain)


@contextmanager
def thread_in_use(config: RunnableConfig) -> Iterator[None]:
    """Keep a run's thread in use, so that it is neither deleted nor expires."""
    with ExitStack() as stack:
        for engine in RunContext.of(config).engines.values():
            stack.enter_context(engine.threads.used(thread_in(config)))
        yield


@contextmanager
def deleting_thread(engines: Sequence[Engine], thread: str) -> Iterator[Callable[[Sequence[str]], None]]:
    """Lock a thread against use, and release its leases after the block, unless the block fails.

    Yields:
        Function of message ids that removes their files, if no other thread leases them. It may raise an `OSError`.

    Raises:
        ThreadBusyError: The thread is in use.
    """
    with ExitStack() as stack:
        leases = [(engine, stack.enter_context(engine.threads.forgetting(thread))) for engine in engines]

        def discard(ids: Sequence[str]) -> None:
            for engine, lease in leases:
                engine.kv.unpersist(engine.lineage.held_by_thread_alone(ids, lease.scopes.values()))

        yield discard
