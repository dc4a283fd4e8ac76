"""Whatever fails where a call begins or ends: table, pool and leases agree, and other tenants are served."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import HoldSteps, MakeEngine
from support.faults import AT_THE_END, InjectedError, failing_once

from choreo_agents import Decode, Engine, MessageHandle, Sampling
from choreo_agents.engine.messages.table import FromCache, MessageTable
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.errors import CapacityError, EngineFailedError, InvalidRequestError
from choreo_agents.kv.cache import KVCache
from choreo_agents.kv.prefix_tree import PrefixTree
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.scheduler import FirstComeFirstServed, Limits, Plan, Running, Waiting
from choreo_agents.sampling import TokenSampler

SHORT = Sampling(max_tokens=4, stop_tokens=(), seed=1)
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4


@pytest.mark.parametrize(
    "labels",
    [
        {"author": ["x"]},
        {"author": {"x": 1}},
        {"author": b"x"},
        {"role": 5},
        {"confidential": "no"},
        {"confidential": None},
        {"lazy": 1},
        {"adapter": 3},
    ],
    ids=str,
)
def test_attack_labels_that_are_none_are_refused_when_the_call_comes_in(engine: Engine, labels: dict[str, Any]) -> None:
    before = engine.stats()
    with pytest.raises(InvalidRequestError, match=next(iter(labels))):
        engine.prefill([5, 6, 7], **labels)
    decoding = {name: value for name, value in labels.items() if name not in ("role", "lazy")}
    if decoding:
        with pytest.raises(InvalidRequestError, match=next(iter(labels))):
            engine.decode([5, 6, 7], sampling=SHORT, **decoding)
    assert engine.stats() == before


def test_attack_a_memo_or_a_watch_that_is_none_is_refused(engine: Engine) -> None:
    for options in ({"idempotency_key": 7}, {"logits_callback": 7}):
        with pytest.raises(InvalidRequestError, match=next(iter(options))):
            engine.decode([Decode([5], sampling=SHORT, **options)])  # type: ignore[arg-type]


# Once all is done there is nothing left that could fail.
POINTS = [
    (fault, after) for fault in AT_THE_END for after in (False, True) if (fault, after) != ("it is finished", True)
]


@pytest.mark.parametrize(("fault", "after"), POINTS, ids=[f"{fault}-{'after' * after}" for fault, after in POINTS])
async def test_attack_whatever_fails_at_the_end_of_a_call_is_that_calls_alone(
    make_engine: MakeEngine, hold_steps: HoldSteps, fault: str, after: bool
) -> None:
    """A call of one tenant fails at some point of its end while another tenant's decodes; then the same call works."""
    plain, engine = make_engine(), make_engine(host_bytes=1 << 22)
    long, text = Sampling(max_tokens=60, stop_tokens=(), seed=2), list(range(20, 50))
    wanted = plain.tokens(plain.decode([9], sampling=long))
    answer = plain.tokens(plain.decode([7], [plain.prefill(text)], sampling=SHORT))
    own = engine.tenant("own")
    root = own.prefill(text, author="root")
    steps = hold_steps(engine)
    other = asyncio.create_task(engine.adecode([9], sampling=long))
    await steps.amake(3)
    with ExitStack() as broken:
        armed: list[object] = []

        def arm(logits: object) -> None:
            if not armed:
                armed.append(logits)
                broken.enter_context(failing_once(*AT_THE_END[fault], after=after, tenant=own._tenant.name))

        call = Decode([7], [root], sampling=SHORT, idempotency_key="m", logits_callback=arm)
        [failed] = own._tenant.submit([call], None)
        steps.go_on()  # the other call has most of its steps before it: what ends first is this one
        error = await asyncio.to_thread(failed.exception, 30)
    assert engine.tokens(await other) == wanted
    engine.check()
    if fault == "its parents are unpinned":
        assert error is None, "it had its answer already"
        own.release(failed.result())
    else:
        assert isinstance(error, EngineFailedError) and isinstance(error.__cause__, InjectedError)
    again = own.decode([7], [root], sampling=SHORT, idempotency_key="m")
    assert own.tokens(again) == answer
    for handle in (root, again):
        own.release(handle)
    engine.check()
    stats = engine.stats()
    assert (stats.leases, stats.unfinished) == (1, 0)
    assert stats.kv_bytes == engine._core.pool.rounded(61) * TOKEN_BYTES


@pytest.mark.parametrize("fault", [(MessageTable, "computed"), (KVCache, "refill"), (FromCache, "close")])
async def test_attack_a_message_whose_return_fails_is_computed_again_for_the_next(
    make_engine: MakeEngine, fault: tuple[type, str]
) -> None:
    engine, plain = make_engine(), make_engine()
    text = list(range(20, 50))
    wanted = plain.tokens(plain.decode([7], [plain.prefill(text)], sampling=SHORT))
    root = engine.prefill(text)
    engine.kv.offload()
    with failing_once(*fault):
        came = await asyncio.gather(
            *(engine.adecode([7], [root], sampling=SHORT.model_copy(update={"seed": 5 + i})) for i in range(3)),
            return_exceptions=True,
        )
    assert all(isinstance(each, MessageHandle | EngineFailedError) for each in came)
    engine.check()
    assert engine.tokens(engine.decode([7], [root], sampling=SHORT)) == wanted


@pytest.mark.parametrize("after", [False, True], ids=["before it has it", "once it has it"])
def test_attack_a_call_that_fails_as_it_gets_its_memory_gives_it_back_once(
    make_engine: MakeEngine, after: bool
) -> None:
    engine = make_engine()
    root = engine.prefill([5] * 20)
    with failing_once(Request, "begin", after=after), pytest.raises(EngineFailedError, match="InjectedError"):
        engine.decode([7], [root], sampling=SHORT)
    engine.check()
    assert engine.stats().kv_bytes == engine._core.pool.rounded(20) * TOKEN_BYTES
    engine.release(engine.decode([7], [root], sampling=SHORT))


@pytest.mark.parametrize("fault", ["insert", "forget_unencoded", "match"])
def test_attack_a_prefix_cache_that_fails_costs_one_call(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine, plain = make_engine(method="baseline"), make_engine(method="naive")
    wanted = plain.tokens(plain.decode([7] * 20, sampling=SHORT))
    engine.decode([7] * 9, sampling=SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixTree, fault, lambda *_: 1 / 0)
        with pytest.raises(EngineFailedError, match="ZeroDivisionError"):
            engine.decode([7] * 20, sampling=SHORT)
    engine.check()
    assert engine.tokens(engine.decode([7] * 20, sampling=SHORT)) == wanted
    with engine._core.lock:
        engine._core.method.evict(engine._core.pool.total_tokens)
    assert engine.stats().kv_bytes == 0, "nothing was lost"


def test_attack_nobody_joins_a_call_whose_end_has_failed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(PlacedCall, "abandon", lambda *_: 1 / 0)
        patch.setattr(PlacedCall, "finish", lambda *_: 1 / 0)
        with pytest.raises(EngineFailedError):
            engine.decode([7], sampling=SHORT, idempotency_key="m")
    assert engine.decode([7], sampling=SHORT, idempotency_key="m", timeout_s=20).length == 5
    engine.admin.restart()


def refusing(_: object) -> None:
    """What a loop does with requests that cannot be run there."""
    raise InvalidRequestError("not here")


def test_attack_a_batch_that_is_refused_leaves_no_lease_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first call was answered already, when the others turned out to be none that can be run."""
    tenant = engine.tenant("a")
    known = tenant.prefill([5, 6])
    said = tenant.decode([7], [known], sampling=SHORT, idempotency_key="m")
    before = tenant.stats().leases
    monkeypatch.setattr(engine._core.loop, "submit", refusing)
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            tenant.decode(
                [
                    Decode([7], [known], sampling=SHORT, idempotency_key="m"),
                    *(Decode([8 + at], sampling=SHORT) for at in range(2)),
                ]
            )
    assert tenant.stats().leases == before
    for handle in (known, said):
        tenant.release(handle)
    engine.check()


def test_attack_a_sampler_that_cannot_be_withdrawn_keeps_no_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's own samplers are others' code: of calls that fail, and of a batch that is refused."""
    tenant = engine.tenant("a")
    root = tenant.prefill([5] * 20)
    monkeypatch.setattr(TokenSampler, "withdraw", lambda _: 1 / 0)
    with pytest.raises(EngineFailedError, match="KeyError"):
        tenant.decode([Decode([7], [root], sampling=SHORT, logits_callback=lambda _: {}["told"])])
    monkeypatch.setattr(engine._core.loop, "submit", refusing)
    with pytest.raises((ZeroDivisionError, InvalidRequestError)):
        tenant.decode([Decode([6 + at], [root], sampling=SHORT) for at in range(3)])
    entry = engine._core.table.get(root.id).entry  # type: ignore[union-attr]
    assert entry is not None and (entry.wanted, engine.stats().unfinished) == (0, 0)
    engine.check()


@pytest.mark.slow
def test_attack_what_was_freed_is_never_read_though_asserts_are_off(tiny_path: Path) -> None:
    """A segment is freed behind the engine's back: under `python -O`, too, its reader fails, and nobody else."""
    program = """
import sys
from choreo_agents import Engine, Memory, Sampling
from choreo_agents.errors import KVMemoryError
assert False, "asserts are off"
with Engine.load(sys.argv[1], memory=Memory(kv_budget_bytes=1 << 22)) as engine:
    mine, other = engine.prefill([5] * 40), engine.tenant("other").prefill([9] * 40)
    segment = engine._core.table.get(mine.id).entry.segment
    engine._core.pool.unpin(segment)
    engine.tenant("other").prefill([11] * 40)
    for _ in range(3):
        try:
            engine.decode([7], [mine], sampling=Sampling(max_tokens=2))
        except KVMemoryError as error:
            print("refused", "freed" in str(error))
        try:
            engine.kv.read(mine)
        except KVMemoryError:
            print("refused True")
    print(engine.tenant("other").decode([7], [other], sampling=Sampling(max_tokens=2, stop_tokens=())).length)
"""
    done = subprocess.run(
        [sys.executable, "-O", "-c", program, str(tiny_path)], check=True, timeout=170, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["refused True"] * 6 + ["3"]


class AdmitsAll(FirstComeFirstServed):
    """Admits whoever comes, though there may be no room."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        return super().plan(waiting, running, 1 << 40, limits)


@pytest.mark.parametrize("by", ["the plan", "admission"])
def test_attack_a_capacity_error_says_what_was_refused_for(make_engine: MakeEngine, by: str) -> None:
    """In the numbers of that moment: what the call writes, what it reads, and what has to stay."""
    policy = FirstComeFirstServed() if by == "the plan" else AdmitsAll()
    engine = make_engine(kv_budget_bytes=TOKEN_BYTES * 16 * 16, host_bytes=1 << 22, policy=policy)
    read, kept = engine.prefill([5] * 96, author="me"), engine.prefill([6] * 64, author="me")
    call = {"header": [7] * 20, "parents": [read], "sampling": Sampling(max_tokens=80)}
    apart, rest = "112 for what it writes and 96 for what it reads", "and the rest is pinned by 'me' .64 tokens"
    engine.kv.pin(kept)
    engine.kv.offload([read])
    with pytest.raises(CapacityError, match=f"208 tokens .*, {apart}: 192 of 256 are free or can be evicted, {rest}"):
        engine.decode(**call)
    engine.kv.prefetch([read])
    there = f"208 tokens .*, {apart}: 192 of 256 are free or can be evicted, {rest}"
    if by == "admission":
        there = f"112 tokens .*: 96 of 256 are free or can be evicted, 96 hold what it reads, {rest}"
    with pytest.raises(CapacityError, match=there):
        engine.decode(**call)


class GivesUp(FirstComeFirstServed):
    """Gives up whoever comes, whatever room there is."""

    def plan(self, waiting: Sequence[Waiting], running: Sequence[Running], free_tokens: int, limits: Limits) -> Plan:
        return Plan((), tuple(each.number for each in waiting), ())


def test_attack_a_call_that_the_policy_gives_up_is_not_told_that_memory_is_full(make_engine: MakeEngine) -> None:
    engine = make_engine(policy=GivesUp())
    with pytest.raises(CapacityError, match=r"scheduling policy rejected the call.* 10912 of 10912 are free"):
        engine.prefill([5] * 16)


def test_attack_a_place_for_what_was_lost_is_given_back_if_it_cannot_be_had(make_engine: MakeEngine) -> None:
    """Two messages that memory has lost are wanted again, and the cache fails at one of them."""
    engine = make_engine()
    roots = [engine.prefill(list(range(first, first + 30))) for first in (20, 40)]
    answer = engine.tokens(engine.decode([7], roots, sampling=SHORT))
    core = engine._core
    for at, after in ((0, False), (0, True), (1, False), (1, True)):
        for root in roots:
            message = core.table.get(root.id)
            assert message is not None
            if message.entry is not None:
                core.cache.drop(message.entry)
            message.entry = None
        with failing_once(KVCache, "hold", at=at, after=after), pytest.raises(InjectedError):
            engine.decode([7], roots, sampling=SHORT)
        engine.check()
        assert not [entry for entry in core.cache.entries_of(None) if entry.wanted]
    assert engine.tokens(engine.decode([7], roots, sampling=SHORT)) == answer


@pytest.mark.parametrize("at", range(3))
def test_attack_a_scope_whose_end_fails_for_one_message_ends_for_all(make_engine: MakeEngine, at: int) -> None:
    engine = make_engine()
    with pytest.raises(InjectedError), ExitStack() as broken, engine.scope():
        for first in (20, 40, 60):
            engine.prefill(list(range(first, first + 9)))
        broken.enter_context(failing_once(MessageTable, "drop_if_unleased", at=at, after=True))
    engine.check()
    assert engine.stats().leases == engine.stats().messages == 0
