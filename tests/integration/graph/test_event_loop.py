"""Nothing blocks the event loop that nodes run on: `langgraph dev` refuses what does."""

from __future__ import annotations

from blockbuster import blockbuster_ctx
from conftest import MakeEngine
from support.graphs import QUESTION, branches


async def test_async_runs_do_not_block_the_event_loop(make_engine: MakeEngine) -> None:
    engine = make_engine()
    app = branches([f"agent{i}" for i in range(4)]).compile(engine=engine)
    with blockbuster_ctx("choreo_agents"):
        state = await app.ainvoke(QUESTION)
        async for _ in app.astream(QUESTION, stream_mode="messages"):
            pass
    assert len(state["handles"]) == 5
