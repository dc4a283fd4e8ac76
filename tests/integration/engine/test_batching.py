"""Parallel branches run as one batch, whoever calls, and each says what it would say alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from conftest import MakeEngine
from support.graphs import QUESTION, branches, said

from choreo_agents import Engine, EngineStats, Memory
from choreo_agents.models import LoadedModel

NAMES = [f"agent{i:02}" for i in range(16)]


@pytest.fixture(scope="module")
def alone(tiny: LoadedModel) -> dict[str, list[int]]:
    """What each branch says with the engine to itself."""
    tokens: dict[str, list[int]] = {}
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 23)) as engine:
        for name in NAMES:
            state = branches([name]).compile(engine=engine).invoke(QUESTION)
            tokens[name] = said(engine, state)[name]
    assert len({tuple(t) for t in tokens.values()}) == len(NAMES), "branches must differ for this to test anything"
    return tokens


def require_batched(stats: EngineStats) -> None:
    """Mean rows per decode step are at least 0.8 of the requests that were there to serve."""
    assert stats.rows_per_decode_step >= 0.8 * stats.unfinished_per_decode_step
    assert stats.rows_per_decode_step > 4, "the branches hardly met"


def require_same(engine: Engine, state: dict[str, Any], alone: dict[str, list[int]]) -> None:
    tokens = said(engine, state)
    assert {name: tokens[name] for name in NAMES} == alone


async def test_sixteen_branches_through_ainvoke(make_engine: MakeEngine, alone: dict[str, list[int]]) -> None:
    engine = make_engine()
    state = await branches(NAMES).compile(engine=engine).ainvoke(QUESTION)
    require_same(engine, state, alone)
    require_batched(engine.stats())


def test_sixteen_branches_through_sync_invoke(make_engine: MakeEngine, alone: dict[str, list[int]]) -> None:
    engine = make_engine()
    state = branches(NAMES).compile(engine=engine).invoke(QUESTION, {"max_concurrency": 16})
    require_same(engine, state, alone)
    require_batched(engine.stats())


def test_two_event_loops_share_one_engine(make_engine: MakeEngine, alone: dict[str, list[int]]) -> None:
    engine = make_engine()
    app = branches(NAMES).compile(engine=engine)
    states: list[Any] = [None, None]

    def run(number: int) -> None:
        states[number] = asyncio.run(app.ainvoke(QUESTION))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in states:
        require_same(engine, state, alone)
    require_batched(engine.stats())


async def test_sync_invoke_inside_a_running_event_loop(make_engine: MakeEngine) -> None:
    """LangGraph may run a single sync node in the caller's thread, which here already runs a loop."""
    engine = make_engine()
    state = branches(NAMES[:1]).compile(engine=engine).invoke(QUESTION)
    assert NAMES[0] in said(engine, state)
