"""Steps that fail: who is not to blame does not notice, and who is fails alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from conftest import MakeEngine

from choreo_agents import Decode, Engine, MessageHandle, Prefill, Sampling
from choreo_agents.errors import CapacityError, DeviceLostError, EngineFailedError
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.scheduler import FirstComeFirstServed, Limits, Plan, Running, Waiting
from choreo_agents.runtime.step import Step
from choreo_agents.tracing import EventList, StepFailed

POISON = 299
"""A token that no step survives in which a call begins with it."""
WARM = Sampling(max_tokens=12, temperature=1.0, stop_tokens=())
Fault = Callable[[Step], BaseException | None]


def break_steps(monkeypatch: pytest.MonkeyPatch, engine: Engine, before: Fault, after: Fault = lambda _: None) -> None:
    """Let a step fail before it has run, or after it has."""
    executor = engine._core.loop.executor
    run = executor.run

    def broken(step: Step, samplers: Any) -> Any:
        error = before(step)
        if error is not None:
            raise error
        chosen = run(step, samplers)
        error = after(step)
        if error is not None:
            raise error
        return chosen

    monkeypatch.setattr(executor, "run", broken)


def poisoned(step: Step) -> BaseException | None:
    begun = [row.tokens for row in step.rows if not row.first]
    return ZeroDivisionError("poison") if any(POISON in tokens for tokens in begun) else None


def calls(root: MessageHandle, count: int = 6) -> list[Decode]:
    return [Decode([7 + i], [root], sampling=WARM.model_copy(update={"seed": i})) for i in range(count)]


def said(engine: Engine, count: int = 6) -> list[list[int]]:
    root = engine.prefill(list(range(20, 60)))
    return [engine.tokens(handle) for handle in engine.decode(calls(root, count))]


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_attack_failures_now_and_then_cost_no_call_and_change_no_word(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Every fifth pass fails, also after samplers have drawn: what is drawn again is the same."""
    events, wanted = EventList(), said(make_engine())
    engine, passes = make_engine(sink=events), [0]

    def fifth(_: Step) -> BaseException | None:
        passes[0] += 1
        return RuntimeError("now and then") if passes[0] % 5 == 0 else None

    none: Fault = lambda _: None  # noqa: E731
    break_steps(monkeypatch, engine, none if when == "after" else fifth, none if when == "before" else fifth)
    assert said(engine) == wanted
    assert engine.stats().failed == 0 and any(isinstance(event, StepFailed) for event in events.events)


def test_attack_only_the_culprit_of_a_failing_step_is_given_up(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = said(make_engine())
    engine = make_engine()
    break_steps(monkeypatch, engine, poisoned)

    async def all_at_once() -> list[Any]:
        root = await engine.aprefill(list(range(20, 60)))
        bad = [engine.adecode([POISON], [root], sampling=WARM), engine.aprefill([5, POISON])]
        good = [engine.adecode(c.header, c.parents, sampling=c.sampling) for c in calls(root)]
        return await asyncio.gather(*bad[:1], *good[:3], *bad[1:], *good[3:], return_exceptions=True)

    came = asyncio.run(all_at_once())
    for error in (came.pop(4), came.pop(0)):
        assert isinstance(error, EngineFailedError) and isinstance(error.__cause__, ZeroDivisionError)
    assert [engine.tokens(handle) for handle in came] == wanted
    assert (engine.stats().failed, engine.stats().unfinished) == (2, 0)


def test_attack_who_reads_in_the_same_step_what_cannot_be_encoded_is_given_up_with_it_and_nobody_else(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    break_steps(monkeypatch, engine, poisoned)
    good, bad = engine.prefill([Prefill([9] * 20, lazy=True), Prefill([POISON] * 20, lazy=True)])

    async def all_at_once() -> list[Any]:
        views = [[good], [bad], [good, bad], [good]]
        made = [engine.adecode([7 + i], view, sampling=WARM) for i, view in enumerate(views)]
        return await asyncio.gather(*made, return_exceptions=True)

    one, two, three, four = asyncio.run(all_at_once())
    assert isinstance(one, MessageHandle) and isinstance(four, MessageHandle)
    assert isinstance(two, EngineFailedError) and isinstance(three, EngineFailedError)
    engine.check()
    assert engine.kv.tiers([good, bad]) == ["device", "lineage"]


def test_attack_an_error_that_cannot_say_what_it_is_stops_nobody_else(make_engine: MakeEngine) -> None:
    class SpeechlessError(RuntimeError):
        def __repr__(self) -> str:
            raise ZeroDivisionError

        __str__ = __repr__

    def watch(_: object) -> None:
        raise SpeechlessError

    wanted, engine = said(make_engine()), make_engine()
    root = engine.prefill(list(range(20, 60)))

    async def all_at_once() -> list[Any]:
        bad = engine.adecode([Decode([9], [root], sampling=WARM, logits_callback=watch)])
        return await asyncio.gather(engine.adecode(calls(root)), bad, return_exceptions=True)

    good, bad = asyncio.run(all_at_once())
    assert [engine.tokens(handle) for handle in good] == wanted
    assert isinstance(bad, EngineFailedError) and "SpeechlessError" in str(bad)


def test_attack_a_watch_that_raises_stops_nobody_else(make_engine: MakeEngine) -> None:
    wanted = said(make_engine())
    engine = make_engine()
    root = engine.prefill(list(range(20, 60)))

    def raising(_: torch.Tensor) -> None:
        raise KeyError("watch")

    async def all_at_once() -> list[Any]:
        made = [asyncio.create_task(engine.adecode(c.header, c.parents, sampling=c.sampling)) for c in calls(root)]
        bad = asyncio.create_task(
            engine._tenant.arun(_one(Decode([8], [root], sampling=WARM, logits_callback=raising)))
        )
        return await asyncio.gather(bad, *made, return_exceptions=True)

    error, *came = asyncio.run(all_at_once())
    assert isinstance(error, EngineFailedError)
    assert [engine.tokens(handle) for handle in came] == wanted


def _one(call: Decode) -> Any:
    from choreo_agents.engine.calling import plan_call

    return plan_call(Decode, [call], (), {})


def _not_copied() -> RuntimeError:
    """As a copy beside the step says it."""
    error = RuntimeError("keys and values could not be copied into the KV memory")
    error.__cause__ = torch.OutOfMemoryError("oom")
    return error


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("oom"), MemoryError(), RuntimeError("can't allocate memory"), _not_copied()]
)
def test_attack_out_of_memory_means_smaller_steps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, most: int, error: BaseException
) -> None:
    """Also for one call alone, whose tokens are cut; and the steps after it do not try the same again at once."""
    wanted = said(make_engine())
    engine, sizes = make_engine(), list[int]()

    def full(step: Step) -> BaseException | None:
        sizes.append(len(step.tokens))
        return error if len(step.tokens) > most else None

    break_steps(monkeypatch, engine, full)
    assert said(engine) == wanted
    assert engine.stats().failed == 0
    tried = len(sizes)
    engine.prefill([11] * 40)
    assert sum(size > most for size in sizes[tried:]) <= 3


def test_attack_larger_steps_are_tried_again_later(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes, full = make_engine(), list[int](), [True]

    def sometimes(step: Step) -> BaseException | None:
        sizes.append(len(step.tokens))
        return MemoryError() if full[0] and len(step.tokens) > 8 else None

    break_steps(monkeypatch, engine, sometimes)
    engine.prefill([11] * 64)
    full[0] = False
    engine.decode([7], sampling=Sampling(max_tokens=300, stop_tokens=()))
    sizes.clear()
    engine.prefill([12] * 64)
    assert sizes == [64]


def test_attack_one_token_for_which_there_is_no_memory_fails_with_a_capacity_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    break_steps(monkeypatch, engine, lambda step: MemoryError() if step.tokens else None)
    with pytest.raises(CapacityError, match="out of memory for a step of one token"):
        engine.prefill([5, 6, 7])
    assert engine.stats().kv_bytes == 0


def test_attack_a_lost_device_ends_the_engine_with_a_typed_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lost = make_engine(), [False]
    root = engine.prefill([5] * 20)

    def breaks(_: Step) -> BaseException | None:
        lost[0] = lost[0] or engine.stats().decode_steps > 3
        return RuntimeError("CUDA error: an illegal memory access was encountered") if lost[0] else None

    break_steps(monkeypatch, engine, breaks)
    monkeypatch.setattr(engine._core.loop.executor, "answers", lambda: not lost[0])

    async def all_at_once() -> list[Any]:
        made = [engine.adecode([7 + i], [root], sampling=WARM) for i in range(5)]
        return await asyncio.wait_for(asyncio.gather(*made, return_exceptions=True), 30)

    came = asyncio.run(all_at_once())
    assert all(isinstance(each, DeviceLostError) for each in came), came
    with pytest.raises(DeviceLostError, match="new process"):
        engine.prefill([9])
    with pytest.raises(DeviceLostError):
        engine.admin.restart()
    engine.check()
    assert engine.stats().unfinished == 0 and engine.tokens(root) == [5] * 20


def test_attack_a_message_that_cannot_be_brought_back_fails_its_readers_and_nobody_else(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(host_bytes=1 << 22)
    good, bad = engine.prefill([9] * 20), engine.prefill([10] * 30)
    wanted = engine.tokens(engine.decode([7], [good], sampling=WARM.model_copy(update={"seed": 1})))
    engine.kv.offload()
    fill = KVPool.fill

    def broken(pool: KVPool, segment: Segment, kv: Any, layer: int) -> None:
        if segment.encoded == 30:
            raise OSError("cannot be copied")
        fill(pool, segment, kv, layer)

    async def all_at_once() -> list[Any]:
        one = engine.adecode([7], [good], sampling=WARM.model_copy(update={"seed": 1}))
        other = engine.adecode([7], [good, bad], sampling=WARM)
        return await asyncio.gather(other, one, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(KVPool, "fill", broken)
        failed, came = asyncio.run(all_at_once())
    assert isinstance(failed, EngineFailedError) and engine.tokens(came) == wanted
    engine.check()
    assert engine.kv.tiers([good, bad]) == ["device", "host"], "it is where it was"
    assert engine.decode([7], [bad], sampling=WARM).length == 13


class AdmitsFirst(FirstComeFirstServed):
    """Serves nobody in the step that admits him."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        plan = super().plan(waiting, running, free_tokens, limits)
        begun = {each.number for each in running}
        return Plan(plan.admitted, plan.stuck, tuple(chunk for chunk in plan.chunks if chunk[0] in begun))


def test_attack_what_a_call_reads_is_brought_back_though_the_policy_does_not_serve_it_yet(
    make_engine: MakeEngine, logits_by_seed: dict[int, list[torch.Tensor]]
) -> None:
    """The step that admits it has no rows, and yet must copy."""
    engine = make_engine(host_bytes=1 << 22, policy=AdmitsFirst())
    root = engine.prefill(list(range(20, 60)))
    for seed in (1, 2):
        engine.decode([7], [root], sampling=Sampling(forced_token_ids=(5, 6), seed=seed))
        engine.kv.offload()
        with engine._core.lock:
            for layer in (*engine._core.pool.keys, *engine._core.pool.values):
                layer.fill_(7.0)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits_by_seed[1], logits_by_seed[2], strict=True))


def test_attack_many_faults_of_all_kinds_leave_everybody_else_with_the_right_answer(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that fail by chance, before and after; steps too large; and calls that always fail, all at once."""
    rng, wanted = Random(5), said(make_engine(), 24)
    engine = make_engine()

    def any_fault(step: Step) -> BaseException | None:
        if len(step.tokens) > 20:
            return torch.OutOfMemoryError("oom")
        return poisoned(step) or (RuntimeError("by chance") if rng.random() < 0.02 else None)

    break_steps(monkeypatch, engine, any_fault, lambda _: RuntimeError("late") if rng.random() < 0.02 else None)

    async def all_at_once() -> list[Any]:
        root = await engine.aprefill(list(range(20, 60)))
        made: list[Any] = []
        for number, call in enumerate(calls(root, 24)):
            made.append(engine.adecode(call.header, call.parents, sampling=call.sampling))
            if number % 6 == 0:
                made.append(engine.adecode([POISON, number], [root], sampling=WARM))
        return await asyncio.gather(*made, return_exceptions=True)

    came = asyncio.run(all_at_once())
    good = [engine.tokens(each) for each in came if isinstance(each, MessageHandle)]
    bad = [each for each in came if not isinstance(each, MessageHandle)]
    assert len(bad) == 4 and all(isinstance(each, EngineFailedError) for each in bad)
    assert good == wanted
