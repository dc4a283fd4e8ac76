"""Tenants of one engine, calls that take too long, come too often or matter more, and an engine that starts again."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import HoldSteps, MakeEngine
from support.adapters import save_adapter
from support.stepping import until

from choreo_agents import Decode, Engine, Memory, Prefill, Sampling, Scheduling
from choreo_agents.engine.rate_limit import RateLimiter
from choreo_agents.engine.request_builder import PlacedCall
from choreo_agents.errors import (
    AdapterError,
    CapacityError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    ReleasedHandleError,
    RequestTimeoutError,
    UnknownHandleError,
)
from choreo_agents.kv.store.spill import SpillFile
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import Event, EventList, FirstToken, RequestFinished

SHORT = Sampling(max_tokens=6, stop_tokens=(), seed=1)
LONG = Sampling(max_tokens=400, stop_tokens=(), seed=1)
TEXT = list(range(20, 40))


def test_an_adapter_is_its_tenants_own(make_engine: MakeEngine, tiny_path: Path, tmp_path: Path) -> None:
    """Only the engine's own is everybody's; equal names of two tenants are two."""
    shared = save_adapter(tmp_path / "shared", tiny_path)
    own, other = (save_adapter(tmp_path / name / "merger", tiny_path, seed=s) for s, name in enumerate("xy", start=2))
    one = make_engine(adapter=shared, salt="a")
    two = one.tenant("b")
    assert one.load_adapter(own) == "merger" and two.adapters == ("shared",)
    with pytest.raises(AdapterError, match=r"(?m)loaded: 'shared'$"):
        two.prefill(TEXT, adapter="merger")
    assert two.load_adapter(other) == "merger" == one.tenant("b").adapters[1]
    made = [tenant.prefill(TEXT, adapter=name) for name in (None, "shared", "merger") for tenant in (one, two)]
    assert made[0].model == made[1].model == made[2].model == made[3].model
    assert len({made[0].model, made[4].model, made[5].model}) == 3
    assert (
        two.inspect.records([made[5]])[-1].adapter == "merger"
        and two.inspect.records([made[1]])[-1].adapter == "shared"
    )
    for tenant, there in ((two, "merger"), (two, "shared")):
        with pytest.raises(AdapterError) as refused:
            tenant.load_adapter(own, there)
        assert str(tmp_path / "x") not in str(refused.value) and str(shared) not in str(refused.value)
    assert two.load_adapter(own, "third") == "third"


@pytest.mark.parametrize("method", ["choreo", "baseline"])
def test_tenants_find_nothing_of_each_other(make_engine: MakeEngine, method: str) -> None:
    """Same salt hits, other salt misses, with handles and with a prefix cache; the words they get are the same."""
    engine = make_engine(method=method, salt="a")
    said: list[list[int]] = []
    encoded: list[int] = []
    for tenant in (engine, engine.tenant("a"), engine.tenant("b"), engine.tenant("b")):
        before = engine.admin.stats().tokens_encoded
        root = tenant.prefill(TEXT)
        said.append(tenant.tokens(tenant.decode([7], [root], sampling=SHORT)))
        encoded.append(engine.admin.stats().tokens_encoded - before)
    assert said == [said[0]] * 4
    if method == "choreo":
        assert encoded == [27, 7, 27, 7]
    else:
        assert encoded[0] == encoded[2] > encoded[1] == encoded[3]


def test_a_handle_of_another_tenant_is_unknown(make_engine: MakeEngine) -> None:
    engine = make_engine()
    other = engine.tenant("b")
    mine, theirs = engine.prefill(TEXT), other.prefill(TEXT)
    assert mine != theirs
    for use in (other.tokens, other.release, other.kv.pin, other.usage, lambda h: other.decode([7], [h])):
        with pytest.raises(UnknownHandleError):
            use(mine)
    engine.release(mine)
    with pytest.raises(UnknownHandleError):
        other.tokens(mine)
    with pytest.raises(ReleasedHandleError):
        engine.tokens(mine)
    assert other.tokens(theirs) == TEXT
    assert engine.tenant("b").tokens(theirs) == TEXT


def test_tenants_share_steps_and_scopes_are_their_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tenants = [engine, engine.tenant("b"), engine.tenant("c")]

    async def all_at_once() -> None:
        await asyncio.gather(*(tenant.adecode([7], sampling=LONG) for tenant in tenants))

    asyncio.run(all_at_once())
    assert engine.admin.stats().rows_per_decode_step > 2.5
    with tenants[1].scope():
        tenants[1].prefill(TEXT)
        kept = tenants[2].prefill(TEXT)
    assert tenants[2].tokens(kept) == TEXT


@pytest.mark.parametrize("budget", [{"host_bytes": 1 << 20}, {"disk": True}, {}], ids=["host", "disk", "lineage"])
def test_tenants_find_nothing_of_each_other_in_any_tier(make_engine: MakeEngine, tmp_path, budget: dict) -> None:
    engine = make_engine(**({"disk": tmp_path} if "disk" in budget else budget))
    root = engine.prefill(TEXT)
    engine.kv.offload()
    while "disk" in budget and engine.stats().host_bytes:
        time.sleep(0.001)  # on its way to the disk
    other = engine.tenant("b")
    again = other.prefill(TEXT)
    assert engine.admin.stats().tokens_encoded == 20 + 20, "another salt encodes anew"
    other.release(again)
    assert engine.tokens(engine.decode([7], [root], sampling=SHORT))
    stats = engine.stats()
    came_back = (stats.restored_from_host, stats.restored_from_disk, stats.recomputed)
    assert came_back == {"host_bytes": (1, 0, 0), "disk": (0, 1, 0), "": (0, 0, 1)}[next(iter(budget), "")]


def test_parking_parks_the_tenants_own(make_engine: MakeEngine) -> None:
    engine = make_engine(host_bytes=1 << 20)
    other = engine.tenant("b")
    engine.prefill(TEXT), other.prefill(TEXT)
    whole = engine.admin.stats().kv_bytes
    other.kv.offload()
    assert engine.admin.stats().kv_bytes == whole // 2


def test_a_call_that_takes_too_long_fails_and_leaves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestTimeoutError, match="timeout_s"):
        engine.decode([7], sampling=LONG.model_copy(update={"max_tokens": 900}), timeout_s=0.02)
    with pytest.raises(TimeoutError):
        engine.prefill(TEXT, timeout_s=0.0)
    deadline = time.monotonic() + 10
    while engine.stats().unfinished and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (engine.stats().kv_bytes, engine.stats().cancelled) == (0, 2)
    assert engine.tokens(engine.prefill(TEXT, timeout_s=60.0)) == TEXT


async def test_only_the_impatient_caller_of_a_shared_call_fails(make_engine: MakeEngine) -> None:
    engine = make_engine()
    patient = asyncio.create_task(engine.adecode([7], sampling=LONG, idempotency_key="m"))
    await asyncio.sleep(0)
    with pytest.raises(RequestTimeoutError):
        await engine.adecode([7], sampling=LONG, idempotency_key="m", timeout_s=0.01)
    assert len(engine.tokens(await patient)) == 401
    assert engine.stats().leases == 1 and engine.stats().cancelled == 0


def test_a_higher_priority_comes_first_and_equals_as_they_came(tiny: LoadedModel) -> None:
    events: list[Event] = []
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 16), sink=events.append) as engine:
        room = engine._core.pool.total_tokens
        filling = Sampling(max_tokens=room - 40, stop_tokens=(), seed=1)
        calls = [Decode([7 + i], sampling=filling, priority=p) for i, p in enumerate((0, 0, 1, 5, 1, 0))]
        engine.decode(calls)
        started = [event.request_id for event in events if isinstance(event, FirstToken)]
        assert started == [3, 2, 4, 0, 1, 5]
        assert [e.outcome for e in events if isinstance(e, RequestFinished)] == ["done"] * 6


def test_starts_are_spread_whichever_thread_they_come_from(make_engine: MakeEngine) -> None:
    """Sixty calls at 25 a second, from a thread and from two loops: the last of them cannot start before 1.4 s."""
    engine = make_engine()
    engine.tenant("", calls_per_second=25)  # its own
    begun = time.monotonic()

    async def some(first: int) -> None:
        await asyncio.gather(*(engine.aprefill([first + i]) for i in range(20)))

    thread = threading.Thread(target=lambda: [engine.prefill([60 + i]) for i in range(20)])
    thread.start()
    asyncio.run(some(20))
    asyncio.run(some(90))
    thread.join()
    assert 1.4 < time.monotonic() - begun < 20
    assert engine.stats().messages == 60


def test_the_rate_is_the_tenants_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    slow = engine.tenant("slow", calls_per_second=0.01)
    assert slow.prefill([5]) and engine.prefill([6]) and engine.prefill([7])
    with pytest.raises(RequestTimeoutError, match="calls_per_second"):
        slow.prefill([6], timeout_s=0.05)
    for wrong in (0, -1, float("nan"), "5", [5]):
        with pytest.raises(InvalidRequestError, match="calls_per_second must be a number above 0"):
            engine.tenant("b", calls_per_second=wrong)  # type: ignore[arg-type]
    assert len(engine.admin.tenants()) == 2, "no tenancy begins with a rate that is none"


def test_a_rate_can_be_taken_off(make_engine: MakeEngine) -> None:
    """Who waits starts then, and so does whoever comes."""
    engine = make_engine()
    slow = engine.tenant("slow", calls_per_second=0.001)
    slow.prefill([5])
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(slow.prefill, [6 + number]) for number in range(3)]
        engine.tenant("slow", calls_per_second=math.inf)
        assert all(each.result(timeout=60) for each in waiting)
    assert slow.prefill([9], timeout_s=60)
    with pytest.raises(RequestTimeoutError, match="calls_per_second"):
        engine.tenant("slow", calls_per_second=0.001).prefill([Prefill([10]), Prefill([11], timeout_s=0.05)])


def test_each_answer_of_a_call_is_a_start(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for answers, salt in ((2, "two"), (1, "one")):
        tenant = engine.tenant(salt)
        header = [tenant.prefill([5])]
        engine.tenant(salt, calls_per_second=0.001)
        call = Decode([6], header, sampling=Sampling(n=answers, max_tokens=1, stop_tokens=()), timeout_s=0.2)
        if answers == 1:
            assert tenant.decode([replace(call, timeout_s=60)])
        else:
            with pytest.raises(RequestTimeoutError, match="calls_per_second"):
                tenant.decode([call])
        assert tenant.stats().finished == (1 if answers == 2 else 2), "nothing was done for what could not start"


def test_all_rates_wait_on_one_thread(make_engine: MakeEngine) -> None:
    engines = [make_engine() for _ in range(2)]
    for number in range(10):
        for engine in engines:
            assert engine.tenant(f"{number}", calls_per_second=50).prefill([5])
    assert sum(thread.name == "choreo-rate-limit" for thread in threading.enumerate()) == 1


def test_closing_ends_the_wait_for_a_start(tiny: LoadedModel) -> None:
    engine = Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 20))
    engine.tenant("", calls_per_second=0.01).prefill([5])
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            engine.prefill([6])
        except EngineClosedError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    engine.close()
    thread.join(timeout=30)
    assert len(failed) == 1
    with pytest.raises(EngineClosedError):
        engine.prefill([7])


def test_a_batch_takes_as_many_starts_as_it_has_calls(make_engine: MakeEngine) -> None:
    engine = make_engine().tenant("a", calls_per_second=20)
    begun = time.monotonic()
    engine.prefill([Prefill([i]) for i in range(20, 60)])
    engine.prefill([61])
    assert time.monotonic() - begun > 0.9


@pytest.mark.parametrize("method", ["choreo", "baseline"])
def test_a_restarted_engine_goes_on_with_the_same_handles(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(method=method)
    root = engine.prefill(TEXT)
    middle = engine.decode([7], [root], sampling=SHORT)
    engine.kv.pin(middle)
    wanted = engine.tokens(engine.decode([8], [root, middle], sampling=SHORT))
    finished = engine.stats().finished
    engine.admin.restart()
    assert engine.stats().kv_bytes == 0 and engine.stats().finished == finished
    assert engine.tokens(engine.decode([8], [root, middle], sampling=SHORT)) == wanted
    assert engine.stats().recomputed == (2 if method == "choreo" else 0)
    engine.kv.unpin(middle)


def is_open(loop: Any) -> bool:
    try:
        loop.require_open()
    except EngineClosedError:
        return False
    return True


async def test_a_restart_fails_what_was_under_way(make_engine: MakeEngine, hold_steps: HoldSteps) -> None:
    engine = make_engine()
    root = engine.prefill(TEXT)
    steps = hold_steps(engine)
    under_way = asyncio.create_task(engine.adecode([7], [root], sampling=LONG, idempotency_key="m"))
    await until(lambda: engine.stats().unfinished)
    await steps.amake(1)
    restarting, loop = asyncio.create_task(asyncio.to_thread(engine.admin.restart)), engine._core.loop
    await until(lambda: not is_open(loop))
    steps.go_on()
    await restarting
    with pytest.raises(EngineClosedError):
        await under_way
    assert len(engine.tokens(await engine.adecode([7], [root], sampling=LONG, idempotency_key="m"))) == 401


def test_an_engine_whose_bookkeeping_failed_goes_on_and_can_be_restarted(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 22)) as engine:
        root = engine.prefill(TEXT)
        wanted = engine.tokens(engine.decode([7], [root], sampling=SHORT))
        with monkeypatch.context() as patch:
            patch.setattr(PlacedCall, "abandon", lambda *_: 1 / 0)
            patch.setattr(engine._core.loop.executor, "run", lambda *_: 1 / 0)
            with pytest.raises(EngineFailedError):
                engine.decode([8], [root], sampling=SHORT, idempotency_key="m")
        assert engine.tokens(engine.decode([7], [root], sampling=SHORT)) == wanted
        engine.admin.restart()
        assert engine.tokens(engine.decode([7], [root], sampling=SHORT)) == wanted
        engine.decode([8], [root], sampling=SHORT, idempotency_key="m")
        engine.check()


def test_events_tell_of_a_timeout(tiny: LoadedModel) -> None:
    events = EventList()
    with (
        Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 20), sink=events) as engine,
        pytest.raises(RequestTimeoutError),
    ):
        engine.prefill(TEXT, timeout_s=0.0)
    assert [e.outcome for e in events.events if isinstance(e, RequestFinished)] == ["timed out"]


@pytest.mark.parametrize(
    "wrong",
    [{"priority": "high"}, {"priority": 1.5}, {"timeout_s": "5"}, {"timeout_s": -1}, {"timeout_s": float("nan")}],
    ids=str,
)
def test_a_wrong_priority_or_timeout_is_refused_and_poisons_nothing(make_engine: MakeEngine, wrong: dict) -> None:
    engine = make_engine()
    for call in (engine.prefill, engine.decode):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            call(TEXT, **wrong)
    assert engine.tokens(engine.prefill(TEXT, timeout_s=30)) == TEXT
    assert engine.stats().unfinished == 0


def test_a_batch_that_cannot_be_submitted_is_given_back_whole(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    root = engine.prefill(TEXT)
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.loop, "submit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.prefill([Prefill([5], [root]), Prefill([6], [root])])
    assert engine.prefill([Prefill([5], [root], timeout_s=30), Prefill([6], [root], timeout_s=30)])
    engine.release(root)
    engine.check()


def test_what_is_computed_again_for_a_low_priority_comes_first_for_a_high_one(tiny: LoadedModel) -> None:
    """Many readers of one lost message, together larger than the pool, before the one for whom it was queued."""
    with Engine.load(
        tiny, memory=Memory(kv_budget_bytes=256 * 768), scheduling=Scheduling(max_batched_tokens=64)
    ) as engine:
        shared = engine.prefill(list(range(20, 84)))
        engine.kv.offload()
        filling = threading.Thread(
            target=lambda: engine.decode([7], sampling=LONG.model_copy(update={"max_tokens": 200}))
        )
        filling.start()
        while not engine.stats().kv_bytes:
            time.sleep(0.001)
        said: list[int] = []

        def read(number: int, priority: int) -> None:
            engine.prefill([100 + number], [shared], priority=priority, timeout_s=60)
            said.append(priority)

        readers = [threading.Thread(target=read, args=(i, int(i > 0))) for i in range(17)]
        readers[0].start()
        while engine.stats().unfinished < 2:
            time.sleep(0.001)
        for reader in readers[1:]:
            reader.start()
        for thread in (filling, *readers):
            thread.join()
        assert len(said) == 17


def test_who_joins_a_waiting_call_lends_it_its_priority(tiny: LoadedModel) -> None:
    done: list[str] = []
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=64 * 768)) as engine:

        async def work() -> None:
            async def call(name: str, token: int, priority: int) -> None:
                await engine.aprefill([token] * 40, priority=priority)
                done.append(name)

            full = asyncio.create_task(engine.adecode([9], sampling=LONG.model_copy(update={"max_tokens": 60})))
            while not engine.stats().kv_bytes:
                await asyncio.sleep(0)
            calls = [call("low", 100, 0), *(call("middle", token, 1) for token in (3, 4, 5)), call("joins", 100, 9)]
            await asyncio.gather(full, *calls)

        asyncio.run(work())
    assert set(done[:2]) == {"low", "joins"} and done[2:] == ["middle"] * 3


def test_waiting_callers_start_in_the_order_they_came() -> None:
    limiter = RateLimiter(50)
    started: list[int] = []
    waiting = [limiter.enter(1) for _ in range(60)]
    for number, each in enumerate(waiting):
        each.add_done_callback(lambda _, number=number: started.append(number))
    for each in waiting:
        each.result(timeout=30)
    limiter.close()
    assert started == list(range(60))


def test_a_rate_is_one_for_all_faces_of_a_tenant(make_engine: MakeEngine) -> None:
    engine = make_engine()
    faces = [engine.tenant("a", calls_per_second=20) for _ in range(10)]
    assert sum(thread.name == "choreo-rate-limit" for thread in threading.enumerate()) <= 1
    begun = time.monotonic()
    for number, face in enumerate([*faces, *faces, *faces, *faces, engine.tenant("a")]):
        face.prefill([5 + number])
    assert time.monotonic() - begun > 0.9
    faces[0].tenant("a", calls_per_second=10_000)
    begun = time.monotonic()
    for number in range(20):
        faces[1].prefill([60 + number])
    assert time.monotonic() - begun < 5


def test_errors_and_maps_name_the_tenants_own_authors_only(tiny: LoadedModel) -> None:
    with Engine.load(tiny, memory=Memory(kv_budget_bytes=256 * 768)) as engine:
        secret, other = engine.tenant("secret"), engine.tenant("other")
        secret.kv.pin(secret.prefill(list(range(20, 220)), author="merger with Initech"))
        with pytest.raises(CapacityError, match=r"pinned by others \(200 tokens\)") as told:
            other.prefill(list(range(20, 100)))
        assert "Initech" not in str(told.value)
        assert list(secret.kv.memory_map().authors) == ["merger with Initech"]
        assert not other.kv.memory_map().authors
        with pytest.raises(CapacityError, match="Initech"):
            secret.prefill(list(range(120, 220)))


def test_scopes_are_shared_by_all_faces_of_a_tenant(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine.tenant("a").scope():
        engine.tenant("a").prefill(TEXT)
        engine.tenant("b").prefill(TEXT)
    assert engine.admin.stats().leases == 1


def test_restarts_and_closes_from_many_threads_leave_one_engine_or_none(tiny: LoadedModel) -> None:
    for last in ("restart", "close"):
        others = set(threading.enumerate())
        engine = Engine.load(tiny, memory=Memory(kv_budget_bytes=1 << 20))
        root = engine.prefill(TEXT)
        stop = threading.Event()

        def work(engine: Engine = engine, root=root, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                try:
                    engine.decode([7], [root], sampling=SHORT)
                except EngineClosedError:
                    time.sleep(0.001)

        workers = [threading.Thread(target=work) for _ in range(3)]
        restarts = [
            threading.Thread(target=lambda engine=engine: [engine.admin.restart() for _ in range(5)]) for _ in range(2)
        ]
        for thread in (*workers, *restarts):
            thread.start()
        for thread in restarts:
            thread.join()
        if last == "close":
            engine.close()
        stop.set()
        for thread in workers:
            thread.join(timeout=30)
            assert not thread.is_alive()
        while engine.stats().unfinished:
            time.sleep(0.001)
        engine.check()
        alive = sum(thread.name == "choreo-engine" for thread in set(threading.enumerate()) - others)
        if last == "restart":
            assert engine.tokens(engine.decode([7], [root], sampling=SHORT)) and alive <= 1
            engine.close()
        else:
            assert not alive
            with pytest.raises(EngineClosedError):
                engine.admin.restart()


def test_a_timeout_is_kept_while_only_the_disk_is_awaited(
    make_engine: MakeEngine, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(disk=tmp_path)
    root = engine.prefill(TEXT)
    engine.kv.offload()
    while engine.stats().host_bytes:
        time.sleep(0.001)
    get = SpillFile.read
    may_answer, answered = threading.Event(), threading.Event()

    def late(*told: Any) -> Any:
        may_answer.wait(10)
        answered.set()
        return get(*told)

    monkeypatch.setattr(SpillFile, "read", late)
    with pytest.raises(RequestTimeoutError):
        engine.decode([7], [root], sampling=SHORT, timeout_s=0.05)
    assert not answered.is_set(), "it is told while the disk is still awaited"
    may_answer.set()


def test_an_engine_whose_thread_cannot_start_says_so_and_can_go_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="new thread"):
            engine.prefill(TEXT)
    assert engine.tokens(engine.prefill(TEXT, timeout_s=30)) == TEXT
