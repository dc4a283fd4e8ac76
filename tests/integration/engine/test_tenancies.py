"""A tenancy ends by itself: its calls fail, its memory comes back, and everybody else goes on."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import HoldSteps, MakeEngine
from support.adapters import save_adapter
from support.stepping import until

from choreo_agents import Decode, Engine, Prefill, Sampling
from choreo_agents.engine.engine import EngineAdmin
from choreo_agents.errors import EngineClosedError, HandleError, InvalidRequestError
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import RequestFinished

TEXT = list(range(20, 60))
SHORT = Sampling(max_tokens=4, stop_tokens=())
LONG = Sampling(max_tokens=900, stop_tokens=())
METHODS = ["choreo", "baseline", "naive"]

FACADE = {
    *("prefill", "aprefill", "decode", "adecode", "stream", "astream"),
    *("text", "tokens", "usage", "logprobs", "release", "scope"),
    *("load", "tenant", "stats", "check", "close", "admin"),
    *("load_adapter", "adapters", "model", "chat", "method", "seed"),
    *("branches", "kv", "inspect", "lineage", "threads", "record"),
}


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def test_an_engine_is_a_facade(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert Engine.__mro__ == (Engine, object) and not hasattr(Engine, "__getattr__")
    assert public(engine) == FACADE and len(FACADE) <= 30
    for part in (engine.branches, engine.kv, engine.inspect, engine.threads, engine.lineage, engine.admin):
        assert 3 <= len(public(part)) <= 16 and type(part).__mro__ == (type(part), object)
    assert engine.tenant("a").admin is None


@pytest.mark.parametrize("method", METHODS)
def test_a_tenant_that_leaves_takes_along_what_only_it_holds(make_engine: MakeEngine, method: str) -> None:
    engine = make_engine(method=method)
    mine = engine.prefill(TEXT)
    before = engine.admin.stats()
    tenant = engine.tenant("a")
    root = tenant.prefill(TEXT, author="ann")
    said = tenant.decode([7], [root], sampling=SHORT, idempotency_key="m")
    if method == "choreo":
        tenant.kv.pin(root)
    open_scope = tenant.scope()
    open_scope.__enter__()
    tenant.prefill([9, 9])
    tenant.close()
    after = engine.admin.stats()
    assert (after.messages, after.leases, after.kv_bytes) == (before.messages, before.leases, before.kv_bytes)
    assert engine.tokens(mine) == TEXT and engine.decode([7], [mine], sampling=SHORT).length == 5
    open_scope.__exit__(None, None, None)
    engine.check()
    uses: list[Any] = [
        lambda: tenant.prefill(TEXT),
        lambda: tenant.decode([7], sampling=SHORT),
        lambda: list(tenant.stream([7], sampling=SHORT)),
        lambda: asyncio.run(tenant.aprefill(TEXT)),
        lambda: tenant.text(root),
        lambda: tenant.usage(said),
        lambda: tenant.logprobs(said),
        lambda: tenant.release(root),
        lambda: tenant.adapters,
        lambda: tenant.load_adapter("."),
        lambda: tenant.kv.key(root),
        lambda: tenant.kv.key(Prefill(TEXT)),
        lambda: tenant.kv.tiers([root]),
        lambda: tenant.kv.prefetch([root]) if method == "choreo" else tenant.tokens(root),
        lambda: tenant.kv.pin(root),
        tenant.kv.offload,
        lambda: tenant.kv.lease([root]),
        tenant.kv.memory_map,
        lambda: tenant.kv.get_or_create(dict),
        lambda: tenant.inspect.records([root]),
        lambda: tenant.inspect.audit([root]),
        lambda: tenant.branches.merge([root]),
        tenant.branches.maps,
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match=r"tenant.* was closed"):
            use()
    tenant.close()


def test_another_tenancy_of_the_same_tenant_finds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with engine.tenant("a") as tenant:
        root = tenant.prefill(TEXT)
        kept = tenant.kv.get_or_create(list)
    again = engine.tenant("a")
    with pytest.raises(HandleError):
        again.tokens(root)
    encoded = engine.admin.stats().tokens_encoded
    assert again.prefill(TEXT) == root and engine.admin.stats().tokens_encoded == encoded + len(TEXT)
    assert again.kv.get_or_create(list) is not kept and again.kv.get_or_create(list) is again.kv.get_or_create(list)


@pytest.mark.parametrize("method", METHODS)
async def test_calls_under_way_fail_and_those_of_others_do_not(
    make_engine: MakeEngine, hold_steps: HoldSteps, method: str
) -> None:
    engine = make_engine(method=method)
    steps = hold_steps(engine)
    one, two = engine.tenant("a"), engine.tenant("b")
    calls = [asyncio.create_task(one.adecode([7], sampling=LONG)) for _ in range(3)]
    other = asyncio.create_task(two.adecode([7], sampling=Sampling(max_tokens=60, stop_tokens=())))
    await until(lambda: engine.admin.stats().unfinished == 4)
    await steps.amake(3)
    closing = asyncio.create_task(asyncio.to_thread(one.close))
    await until(lambda: one._tenant.closed)
    steps.go_on()
    await closing
    for call in calls:
        with pytest.raises(EngineClosedError, match=r"tenant.* was closed"):
            await call
    assert len(two.tokens(await other)) == 61
    assert engine.admin.stats().failed == 3 and engine.admin.stats().unfinished == 0
    assert two.stats().messages == 1


def test_streams_and_recomputations_end_too(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batched_tokens=16)
    tenant = engine.tenant("a")
    root = tenant.prefill(list(range(5, 100)))
    tenant.kv.offload()
    with pytest.raises(EngineClosedError):
        for count, _ in enumerate(tenant.stream([7], [root], sampling=LONG)):
            if count == 2:
                tenant.close()
    assert engine.admin.stats().kv_bytes == 0


def test_a_tenant_can_leave_in_its_own_callback(make_engine: MakeEngine) -> None:
    """On the engine's thread nobody can wait for the engine: the calls fail with the next step."""
    engine = make_engine()
    tenant = engine.tenant("a")

    def leave(_: object) -> None:
        tenant.close()

    [answer] = tenant._tenant.submit([_decode()], None, leave)
    with pytest.raises(EngineClosedError):
        answer.result(timeout=10)
    while engine.admin.stats().kv_bytes:
        time.sleep(0.001)


def _decode() -> Any:
    from choreo_agents import Decode

    return Decode([7], sampling=LONG)


def test_what_cannot_be_called_and_what_is_closed_waits_for_no_rate(make_engine: MakeEngine) -> None:
    """A time that is no number would keep all those waiting that have a rate."""
    engine = make_engine()
    tenant = engine.tenant("a", calls_per_second=0.01)
    tenant.prefill([Prefill([5])])
    for wrong in (float("nan"), "1"):
        with pytest.raises(InvalidRequestError, match="timeout_s must be a number"):
            tenant.prefill([Prefill([6]), Prefill([7], timeout_s=wrong)])  # type: ignore[arg-type]
    engine.admin.close()
    for again in ("a", "b"):
        late = engine.tenant(again, calls_per_second=0.01)
        for _ in range(2):
            with pytest.raises(EngineClosedError):
                late.prefill([Prefill([8])])


async def test_a_call_that_waits_for_its_rate_fails(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tenant = engine.tenant("a", calls_per_second=0.01)
    tenant.prefill(TEXT)
    waiting = asyncio.create_task(tenant.aprefill([5, 6]))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(tenant.close)
    with pytest.raises(EngineClosedError):
        await waiting
    assert engine.tenant("a").prefill(TEXT).length == len(TEXT), "another tenancy has no rate yet"


def test_adapters_go_with_the_last_who_has_a_name_for_them(
    make_engine: MakeEngine, tiny_path: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    folder = save_adapter(tmp_path / "shared", tiny_path, seed=3)
    one, two = engine.tenant("a"), engine.tenant("b")
    one.load_adapter(folder)
    two.load_adapter(folder, "mine")
    one.close()
    assert two.adapters == ("mine",) and engine.tenant("a").adapters == ()
    assert two.prefill(TEXT, adapter="mine").length == len(TEXT)
    two.close()
    assert not engine._core.adapters.loras


def test_the_owner_sees_all_tenants_and_closes_for_all(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tenants = [engine.tenant(salt) for salt in ("a", "b")]
    tenants[0].prefill(TEXT)
    tenants[0].kv.lease([tenants[0].prefill(TEXT)])
    assert engine.admin is not None
    seen = engine.admin.tenants()
    assert sorted((held.messages, held.leases, held.tokens["device"]) for held in seen.values()) == [
        (0, 0, 0),
        (0, 0, 0),
        (1, 3, len(TEXT)),
    ]
    assert not {"a", "b", ""} & {*seen}, "names do not tell salts"
    tenants[1].close()
    assert len(engine.admin.tenants()) == 2
    engine.close()
    for tenant in (engine, *tenants):
        with pytest.raises(EngineClosedError):
            tenant.prefill(TEXT)
    with pytest.raises(EngineClosedError):
        engine.admin.restart()


def test_tenancies_come_and_go_while_others_work(make_engine: MakeEngine, tiny: LoadedModel) -> None:
    engine = make_engine()
    wanted = engine.tokens(engine.decode([7], [engine.prefill(TEXT)], sampling=SHORT.model_copy(update={"seed": 3})))
    failures: list[BaseException] = []

    def work(salt: str) -> None:
        for _ in range(15):
            try:
                with engine.tenant(salt) as tenant:
                    root = tenant.prefill(TEXT)
                    said = tenant.decode([7], [root], sampling=SHORT.model_copy(update={"seed": 3}))
                    assert tenant.tokens(said) == wanted
            except EngineClosedError:
                pass  # two of a salt: one has ended the other's tenancy
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(salt,)) for salt in ("a", "a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert engine.admin.stats().messages == 2 and len(engine.admin.tenants()) == 1  # type: ignore[union-attr]


def test_only_handles_are_named_and_parked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    root = engine.prefill(TEXT)
    call = Prefill([5, 6], [root], [3])
    assert engine.kv.key(call).id == engine.prefill([call])[0].id and engine.kv.key(root).id == root.id
    assert engine.kv.key(call).parents == ((root.id, 3 - 43),)
    for wrong in ([5], "abc", None):
        with pytest.raises(InvalidRequestError):
            engine.kv.key(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        engine.kv.key(Prefill([5], ["root"]))  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="expected a MessageHandle"):
        engine.kv.tiers(["root"])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="has no key"):
        engine.kv.key(Prefill(TEXT, [root], maps=True))


def test_a_tenancy_can_begin_on_the_engines_thread_while_another_ends(make_engine: MakeEngine) -> None:
    told: list[str] = []

    def sink(event: Any) -> None:
        if isinstance(event, RequestFinished):  # the call that goes with the tenancy: who closes it waits for this
            engine.tenant("b")
            try:
                engine.tenant("a")
            except EngineClosedError as error:
                told.append(str(error))

    engine = make_engine(sink=sink)
    tenant, begun = engine.tenant("a"), threading.Event()
    call = Decode([7], sampling=LONG, logits_callback=lambda _: begun.set())
    [answer] = tenant._tenant.submit([call], None)
    assert begun.wait(10)
    threads = [threading.Thread(target=tenant.close, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    with pytest.raises(EngineClosedError, match="before this call finished"):
        answer.result(10)
    assert len(told) == 1 and "is being closed" in told[0]
    assert engine.tenant("a").prefill(TEXT).length == len(TEXT)


def test_tenancies_are_listed_while_they_come_and_go(make_engine: MakeEngine) -> None:
    engine, failures, over = make_engine(), [], threading.Event()
    assert engine.admin is not None

    def come_and_go(salt: str) -> None:
        for number in range(150):
            engine.tenant(f"{salt}{number}").close()

    def look(owner: EngineAdmin) -> None:
        try:
            while not over.is_set():
                owner.tenants()
        except RuntimeError as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        lookers = [threading.Thread(target=look, args=(engine.admin,)) for _ in range(2)]
        movers = [threading.Thread(target=come_and_go, args=(salt,)) for salt in "ab"]
        for thread in (*lookers, *movers):
            thread.start()
        for thread in movers:
            thread.join()
        over.set()
        for thread in lookers:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures
