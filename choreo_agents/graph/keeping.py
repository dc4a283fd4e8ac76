"""Which thread keeps what a call of a graph encodes: until it is forgotten, or has not been used for long."""

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
    """The thread that keeps what is encoded in the run of a compiled graph that is called with this config, or in the
    node whose config it is: that of the outermost graph of ours, which its nodes know.

    In a graph of LangGraph's own nobody says when a run ends: without a checkpointer each call is kept by itself.
    """
    if (known := RunContext.of(config).thread) is not None:
        return known
    thread = thread_of(config)
    return EphemeralRun(is_whole=graph is not None) if thread is None or saver_of(config, graph) is None else thread


@asynccontextmanager
async def speaking(
    engine: Engine, config: RunnableConfig, entries: Sequence[HandleEntry], answers: Sequence[MessageHandle] = ()
) -> AsyncGenerator[RunLineage | None]:
    """A block whose calls lease what they make for the thread of a node's run, and all that is left of these entries
    and answers: a fork holds what it has from where it was forked, and another model what is its own.

    Yields:
        The thread's lineage, from which the engine has learnt again what it did not know of them.
    """
    thread = thread_in(config)
    with engine.threads.used(thread) as held, engine.threads.speaking(thread) as scope:
        lineage = await lineage_of(engine, config, thread, scope, held.noted)
        if lineage is not None:
            await lineage.restore(named_in(entries))
        engine.threads.hold([*named_in(entries), *answers], scope)
        yield lineage


def named_in(entries: Iterable[HandleEntry]) -> Iterator[MessageHandle]:
    """All handles in entries, of whatever model."""
    for entry in entries:
        yield from handles_of(entry)
        for noted in (entry.get("prompt"), entry.get("thoughts")):
            if noted is not None:
                yield MessageHandle.model_validate(noted)


@contextmanager
def under_way(config: RunnableConfig) -> Iterator[None]:
    """A block in which nothing of a run's thread is forgotten."""
    with ExitStack() as all_of_them:
        for engine in RunContext.of(config).engines.values():
            all_of_them.enter_context(engine.threads.used(thread_in(config)))
        yield


@contextmanager
def forgetting(engines: Sequence[Engine], thread: str) -> Iterator[Callable[[Sequence[str]], None]]:
    """A block in which a thread cannot be used, and after which its leases are given back, unless the block fails.

    Yields:
        What removes the files of messages, by their ids, that nobody else leases. It raises an `OSError` if it cannot.

    Raises:
        ThreadBusyError: It is under way.
    """
    with ExitStack() as all_of_them:
        held = [(engine, all_of_them.enter_context(engine.threads.forgetting(thread))) for engine in engines]

        def discard(ids: Sequence[str]) -> None:
            for engine, holding in held:
                engine.kv.unpersist(engine.lineage.held_by_thread_alone(ids, holding.scopes.values()))

        yield discard
