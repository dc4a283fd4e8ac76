"""What a hostile review once broke: each of these failed before it was mended."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HoldSteps, MakeEngine
from support.stepping import until
from support.tiny import save_tiny_llama

from choreo_agents import Decode, Engine, Memory, Prefill, Sampling, Scheduling
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.errors import EngineFailedError, InvalidRequestError, KVBudgetError
from choreo_agents.models import LoadedModel, load_model

TOKEN_BYTES = 3 * 64 * 4
SHORT = Sampling(max_tokens=4, stop_tokens=())
WARM = Sampling(max_tokens=8, temperature=1.0, stop_tokens=())


def test_a_reused_prefix_never_stands_in_the_way_of_its_reader(make_engine: MakeEngine) -> None:
    """One shared token pins a whole segment of the prefix cache; the call must then do without it."""
    engine = make_engine(method="baseline", kv_budget_bytes=TOKEN_BYTES * 16 * 11)
    naive = make_engine(method="naive")
    for prompt in ([1] + [5] * 94, [1] + [6] * 110):
        said = engine.decode(prompt, sampling=SHORT)
        assert engine.tokens(said) == naive.tokens(naive.decode(prompt, sampling=SHORT))


@pytest.mark.slow
def test_leaving_in_the_middle_of_a_stream_ends_the_interpreter_in_order(tiny_path: Path) -> None:
    program = """
import sys
from choreo_agents import Engine, Memory, Sampling
engine = Engine.load(sys.argv[1], memory=Memory(kv_budget_bytes=1 << 23))
for _ in engine.stream([5], sampling=Sampling(max_tokens=1000, stop_tokens=())):
    break
pending = engine.stream([6], sampling=Sampling(max_tokens=1000, stop_tokens=()))
next(pending)
"""
    result = subprocess.run([sys.executable, "-c", program, str(tiny_path)], check=False, timeout=170)
    assert result.returncode == 0


def test_a_lease_released_by_another_thread_leaves_its_scope_intact(engine: Engine) -> None:
    def in_thread(work: Any) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        thread.join()
        return results[0]

    with engine.scope():
        handle = engine.prefill([5, 6])
        engine.prefill([9, 9])
        engine.prefill([5, 6])
        in_thread(lambda: engine.release(handle))
        engine.check()
    assert engine.stats().leases == 0 and engine.stats().kv_bytes == 0
    with engine.scope():
        engine.prefill([5, 6])
        kept = in_thread(lambda: engine.prefill([5, 6]))
        engine.release(kept)
        kept = in_thread(lambda: engine.prefill([5, 6]))
    assert engine.tokens(kept) == [5, 6], "the scope took only what was its own"


def test_calls_with_one_memo_share_one_answer_also_at_once(engine: Engine) -> None:
    one, two = engine.decode([Decode([7], sampling=WARM, idempotency_key="x")] * 2)
    assert one == two and engine.stats().finished == 1
    engine.release(one)
    assert engine.decode([7], sampling=WARM, idempotency_key="x") == two


async def test_streams_with_one_memo_each_see_every_token(engine: Engine) -> None:
    async def tokens() -> list[int]:
        items = [item async for item in engine.astream([7], sampling=WARM, idempotency_key="x")]
        return [item.token for item in items[:-1]]  # type: ignore[union-attr]

    first, second = await asyncio.gather(tokens(), tokens())
    assert first == second and len(first) == 8


def test_a_view_that_can_never_fit_beside_its_parents_is_refused_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_budget_bytes=TOKEN_BYTES * 160)
    parent = engine.prefill([5] * 100)
    before = engine.stats()
    with pytest.raises(KVBudgetError, match="and what it reads"):
        engine.decode([7], [parent], sampling=Sampling(max_tokens=90))
    assert engine.stats() == before
    assert engine.decode([7], [parent, parent], [0, 5], sampling=SHORT).length == 5, "one parent twice is there once"


@pytest.mark.parametrize("options", [{"sampling": SHORT}, {"author": "x"}, {"bogus": 1}])
def test_a_batch_takes_no_arguments_that_it_would_ignore(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="takes no other arguments"):
        engine.decode([Decode([5])], **options)
    parent = engine.prefill([5])
    with pytest.raises(InvalidRequestError, match="takes no other arguments"):
        engine.prefill([Prefill([9])], [parent])


def test_refused_and_memoised_calls_do_not_move_the_seeds_of_others(make_engine: MakeEngine) -> None:
    plain, disturbed = make_engine(), make_engine()
    wanted = [plain.tokens(plain.decode([7], sampling=WARM)) for _ in range(2)]
    got = [disturbed.tokens(disturbed.decode([7], sampling=WARM, idempotency_key="x"))]
    with pytest.raises(InvalidRequestError):
        disturbed.decode([Decode([7], sampling=WARM), Decode([])])
    disturbed.decode([7], sampling=WARM, idempotency_key="x")
    got.append(disturbed.tokens(disturbed.decode([7], sampling=WARM)))
    assert got == wanted


def test_a_sink_that_raises_stops_nobody(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(sink=lambda event: 1 / 0)
    assert engine.decode([7], sampling=SHORT).length == 5
    assert [record.name for record in caplog.records] == ["choreo_agents.tracing"]


def test_usage_is_that_of_the_latest_call(engine: Engine) -> None:
    engine.prefill([7, 9, 9])
    said = engine.decode([7], sampling=Sampling(forced_token_ids=(9, 9)))
    assert engine.usage(said).ttft_s is not None


async def test_a_cancelled_baseline_decode_keeps_only_what_it_encoded(
    make_engine: MakeEngine, hold_steps: HoldSteps
) -> None:
    engine = make_engine(method="baseline")
    steps = hold_steps(engine)
    task = asyncio.create_task(engine.adecode([7], sampling=Sampling(max_tokens=900, stop_tokens=())))
    await steps.amake(3)
    task.cancel()
    await asyncio.sleep(0)
    steps.go_on()
    await until(lambda: not engine.stats().unfinished)
    assert engine.stats().kv_bytes <= engine.stats().tokens_encoded * TOKEN_BYTES + 16 * TOKEN_BYTES


def test_an_engine_that_is_dropped_ends_its_thread(tiny: LoadedModel) -> None:
    def use_and_drop() -> threading.Thread | None:
        engine = Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 20))
        engine.prefill([5])
        return engine._core.loop._thread

    thread = use_and_drop()
    gc.collect()
    assert thread is not None
    thread.join(timeout=30)
    assert not thread.is_alive()


BAD_INPUT = {
    "a number": lambda e, h: e.prefill(5),
    "nothing": lambda e, h: e.prefill(None),
    "a dict": lambda e, h: e.prefill({"a": 1}),
    "bytes": lambda e, h: e.prefill(b"ab"),
    "a lone surrogate": lambda e, h: e.prefill("\ud800"),
    "words for tokens": lambda e, h: e.prefill(["a", "b"]),
    "no parents at all": lambda e, h: e.prefill([5], None),
    "a bare handle for parents": lambda e, h: e.prefill([5], h),
    "a number for offsets": lambda e, h: e.prefill([5], [h], 0),
    "a dict for sampling": lambda e, h: e.decode([5], sampling={"max_tokens": 3}),
    "a number for closing": lambda e, h: e.decode([5], turn_suffix=2),
    "an impossible forced token": lambda e, h: e.decode([5], sampling=Sampling(forced_token_ids=(-1,))),
    "a batch that mixes calls and tokens": lambda e, h: e.decode([Decode([5]), 7]),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_a_typed_error(engine: Engine, name: str) -> None:
    handle = engine.prefill([5, 6])
    before = engine.stats()
    with pytest.raises(InvalidRequestError):
        BAD_INPUT[name](engine, handle)
    assert engine.stats() == before


def test_integers_of_numpy_and_torch_are_tokens(engine: Engine) -> None:
    handle = engine.prefill([5, 6, 7])
    assert engine.prefill(np.array([5, 6, 7])) == handle
    assert engine.prefill(torch.tensor([5, 6, 7])) == handle
    assert engine.prefill(token for token in (5, 6, 7)) == handle  # type: ignore[arg-type]


def test_settings_out_of_range_are_refused(tiny: LoadedModel) -> None:
    for setting, value in (
        (Scheduling, {"max_batched_tokens": 0}),
        (Scheduling, {"max_num_seqs": 0}),
        (Memory, {"kv_budget_bytes": 0}),
    ):
        with pytest.raises(ValueError, match=next(iter(value))):
            setting(**value)
    for budget in (100, 1 << 62):
        with pytest.raises(ValueError, match="KV budget"):
            Engine.load(tiny, memory=Memory(kv_budget_bytes=budget))
    with pytest.raises(InvalidRequestError, match="loaded already"):
        Engine.load(tiny, dtype=torch.bfloat16)


def test_more_requests_than_tokens_in_a_step_all_get_their_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batched_tokens=3)
    handles = engine.decode([Decode([5 + i] * 7, sampling=SHORT) for i in range(8)])
    assert [handle.length for handle in handles] == [11] * 8


async def test_cancelled_waiters_reuse_nothing(make_engine: MakeEngine, hold_steps: HoldSteps) -> None:
    engine = make_engine(max_batched_tokens=8)
    content = [5 + i % 300 for i in range(800)]
    steps = hold_steps(engine)
    tasks = [asyncio.create_task(engine.aprefill(content)) for _ in range(2)]
    await steps.amake(2)
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)
    steps.go_on()
    await until(lambda: not engine.stats().unfinished)
    assert engine.stats().tokens_reused == 0


def test_one_changed_weight_in_the_middle_changes_the_fingerprint(tmp_path: Path) -> None:
    model = load_model(save_tiny_llama(tmp_path, hidden_size=128, vocab_size=20000))
    from choreo_agents.models.fingerprint import fingerprint

    inner = model.adapter.model
    before = fingerprint(inner)
    with torch.no_grad():
        inner.model.embed_tokens.weight[12345, 77] += 0.5
    assert fingerprint(inner) != before


def test_the_engine_thread_never_holds_its_lock_during_a_forward_pass(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every event loop that submits a call would stand still for the length of a step."""
    executor = engine._core.loop.executor
    run = executor.run
    inside, may_go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        inside.set()
        assert may_go_on.wait(30)
        return run(*arguments)

    monkeypatch.setattr(executor, "run", slow)
    thread = threading.Thread(target=engine.prefill, args=([5, 6],))
    thread.start()
    assert inside.wait(10)
    taken = threading.Event()

    def take() -> None:
        with engine._core.lock:
            taken.set()

    taking = threading.Thread(target=take)
    taking.start()
    was_free = taken.wait(10)
    may_go_on.set()
    thread.join()
    taking.join()
    assert was_free


async def test_a_call_that_outlives_its_scope_takes_no_lease(engine: Engine, hold_steps: HoldSteps) -> None:
    steps = hold_steps(engine)
    with engine.scope():
        task = asyncio.create_task(engine.adecode([7], sampling=Sampling(max_tokens=50, stop_tokens=())))
        await until(lambda: engine.stats().unfinished)
        await steps.amake(2)
    steps.go_on()
    await task
    assert (engine.stats().leases, engine.stats().messages, engine.stats().kv_bytes) == (0, 0, 0)


@pytest.mark.parametrize("broken", ["finish", "abandon"])
def test_nobody_waits_for_ever_when_the_bookkeeping_itself_fails(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        monkeypatch.setattr(PlacedCall, broken, lambda *_: 1 / 0)
        if broken == "abandon":
            monkeypatch.setattr(engine._core.loop.executor, "run", lambda *_: 1 / 0)
        with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
            engine.decode([7], sampling=SHORT)
