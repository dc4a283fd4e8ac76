"""Nothing blocks the event loop that nodes run on: `langgraph dev` refuses what does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from conftest import MakeEngine
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from support.graphs import QUESTION, branches


async def test_async_runs_do_not_block_the_event_loop(make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = branches([f"agent{i}" for i in range(4)]).compile(engine=engine)
    with blockbuster_ctx("choreo_agents"):
        state = await app.ainvoke(QUESTION)
        async for _ in app.astream(QUESTION, stream_mode="messages"):
            pass
    assert len(state["handles"]) == 5


async def test_nor_does_what_keeps_their_lineage(make_engine: MakeEngine, tmp_path: Path) -> None:
    for asked in (QUESTION, {"messages": [("user", "And?")]}):
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "states")) as saver:
            app = branches(["ann", "bob"]).compile(saver, engine=make_engine(salt="s"))
            with blockbuster_ctx("choreo_agents"):
                state = await app.ainvoke(asked, {"configurable": {"thread_id": "1"}})
    assert len(state["handles"]) == 6 and (tmp_path / "states.lineage").exists()


async def test_answers_that_are_there_leave_others_their_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.aprefill([5] * 20)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    started = time.perf_counter()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            for _ in range(100_000):
                await engine.aprefill([5] * 20)  # found each time
    task.cancel()
    assert turns > 1 and time.perf_counter() - started < 5, "a timeout ends the loop long before it has gone round"


async def test_who_was_cancelled_gets_no_answer_though_it_is_there(make_engine: MakeEngine) -> None:
    engine = make_engine()
    known = engine.prefill([5] * 20)
    done: list[object] = []

    async def ask() -> None:
        while True:
            done.append(await engine.aprefill([5] * 20))

    task = asyncio.create_task(ask())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in (known, *done):
        engine.release(known)
    assert engine.stats().messages == 0, "the lease that the cancelled one would have had went back"
