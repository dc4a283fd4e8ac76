"""A cancelled request stops, gives its memory back, and disturbs nobody."""

from __future__ import annotations

import asyncio

import pytest
from conftest import HoldSteps, MakeEngine
from support.graphs import FREE
from support.stepping import until

from choreo_agents import Decode, Engine, MessageHandle, Sampling, StreamedToken
from choreo_agents.errors import CapacityError, EngineClosedError, EngineFailedError

LONG = Sampling(max_tokens=200, stop_tokens=())


async def test_cancelling_one_of_sixteen_branches_mid_decode(engine: Engine, hold_steps: HoldSteps) -> None:
    root = engine.prefill("<|user|> What does Ann have?<|end|>")
    alone = [engine.tokens(engine.decode([7], [root], sampling=FREE.model_copy(update={"seed": i}))) for i in range(16)]
    before = engine.stats()
    with engine.scope():

        async def branch(seed: int) -> list[int]:
            handle = await engine.adecode([7], [root], sampling=FREE.model_copy(update={"seed": seed}))
            return engine.tokens(handle)

        steps = hold_steps(engine)
        tasks = [asyncio.create_task(branch(seed)) for seed in range(16)]
        await until(lambda: engine.stats().unfinished == 16)
        await steps.amake(4)
        tasks[5].cancel()
        await asyncio.sleep(0)
        steps.go_on()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[5], asyncio.CancelledError)
        assert [r for i, r in enumerate(results) if i != 5] == [t for i, t in enumerate(alone) if i != 5]
    after = engine.stats()
    assert after.cancelled == before.cancelled + 1
    assert (after.messages, after.leases, after.kv_bytes) == (before.messages, before.leases, before.kv_bytes)
    assert after.unfinished == 0


async def test_cancelling_a_call_lets_the_next_one_in_that_waits_for_room(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    engine = make_engine(kv_budget_bytes=256 * 3 * 64 * 4)
    steps = hold_steps(engine)
    task = asyncio.create_task(engine.adecode([7], sampling=LONG))
    await steps.amake(2)
    second = asyncio.create_task(engine.adecode([8], sampling=LONG))
    await until(lambda: engine.stats().unfinished == 2)
    await steps.amake(2)
    assert engine.stats().rows_per_step == 1, "there is no room for both"
    task.cancel()
    await asyncio.sleep(0)
    steps.go_on()
    handle = await second
    assert handle.length == 201
    engine.release(handle)
    await until(lambda: engine.stats().kv_bytes == 0)


async def test_leaving_a_stream_early_cancels_it(engine: Engine) -> None:
    # As long as there is context: engines elsewhere must not have ended it before they hear that it was left.
    stream = engine.astream([7], sampling=LONG.model_copy(update={"max_tokens": 1000}))
    async for item in stream:
        assert isinstance(item, StreamedToken)
        break
    await stream.aclose()
    await until(lambda: engine.stats().unfinished == 0)
    assert engine.stats().kv_bytes == 0 and engine.stats().cancelled == 1


async def test_cancelling_one_of_two_who_wait_for_the_same_prefill(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    engine = make_engine(max_batched_tokens=8)
    content = [5 + i % 300 for i in range(400)]
    steps = hold_steps(engine)
    first, second = (asyncio.create_task(engine.aprefill(content)) for _ in range(2))
    await steps.amake(2)
    first.cancel()
    await asyncio.sleep(0)
    steps.go_on()
    handle = await second
    assert engine.stats().leases == 1 and handle.length == 400
    assert engine.stats().tokens_encoded == 400


def test_a_request_that_finds_only_pinned_memory_fails_and_can_be_repeated(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=256 * 3 * 64 * 4)
    held = engine.prefill([5] * 100, author="alice")
    engine.kv.pin(held)
    reason = (
        r"no room for 208 tokens \(\d+ bytes\): 144 of 256 are free or can be evicted, "
        r"and the rest is pinned by 'alice' \(100 tokens\)"
    )
    with pytest.raises(CapacityError, match=reason):
        engine.decode([7], sampling=LONG)
    engine.kv.unpin(held)
    assert engine.decode([7], sampling=LONG).length == 201


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = engine.prefill([5, 6])
    before = engine.stats()
    executor = engine._core.loop.executor
    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", lambda *_: 1 / 0)
        with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
            engine.decode([Decode([7], [root], sampling=LONG), Decode([8], [root], sampling=LONG)])
    assert engine.stats().kv_bytes == before.kv_bytes
    assert isinstance(engine.decode([7], [root], sampling=Sampling(max_tokens=2)), MessageHandle)


async def test_closing_fails_what_is_unfinished_and_what_comes_after(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    engine = make_engine()
    steps = hold_steps(engine)
    task = asyncio.create_task(engine.adecode([7], sampling=LONG))
    await steps.amake(2)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    await until(lambda: engine._core.loop._closed)
    steps.go_on()
    await closing
    with pytest.raises(EngineClosedError):
        await task
    with pytest.raises(EngineClosedError):
        engine.prefill([5])
    assert engine.stats().kv_bytes == 0
