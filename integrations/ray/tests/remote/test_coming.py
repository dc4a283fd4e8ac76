"""Engines that come, late, again or with something else than the router has; and tenants that begin and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from choreo_ray.remote import Copying, Costs, EngineWorker, Hello, Releasing, SentAnswer, SentCall, remote_engine
from choreo_ray.remote.protocol import own_version
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route
from remote_support.loopback import MortalEngine, WiredEngine, routed
from support.adapters import save_adapter, save_mapper

from choreo_agents import Engine, Memory, Prefill, Sampling
from choreo_agents.errors import AdapterError, EngineFailedError, EngineLostError, EngineMismatchError
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EngineDown, EngineUp, EventList, RequestFinished

MEMORY = Memory(kv_budget_bytes=1 << 23)
SHORT = Sampling(max_tokens=4, stop_tokens=())
NOTE = "Ann has 3 red kites."
FOREVER = 1 << 62


@pytest.fixture
def wired(embedded: LoadedModel) -> Iterator[WiredEngine]:
    made = WiredEngine("a", Engine.load(embedded, memory=MEMORY))
    yield made
    made.close()


def until(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    while not what():
        time.sleep(0.01)


def came(events: EventList) -> int:
    return sum(isinstance(event, EngineUp) for event in events.events)


def foremost(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """All calls run on the engine that comes first by its name, of those that are there."""
    return Route(min(engine.name for engine in engines), {}, (), 0, 0, 0.0)


class TestWhatEnginesHaveLoaded:
    def test_calls_that_name_no_adapter_are_run_with_the_same_one(
        self, tiny_path: Path, tiny: LoadedModel, tmp_path: Path
    ) -> None:
        adapter = save_adapter(tmp_path / "one", tiny_path, seed=1)
        for theirs, own in ((None, adapter), (adapter, None)):
            with Engine.load(tiny, adapter=theirs, memory=MEMORY) as engine:
                assert engine.admin is not None
                with pytest.raises(EngineMismatchError, match="load all with the same adapter"):
                    remote_engine([EngineWorker(engine, "a")], tiny, adapter=own)
                said = engine.tokens(engine.decode([5, 6, 7], sampling=SHORT))
                with remote_engine([EngineWorker(engine, "a")], tiny, adapter=theirs) as router:
                    assert router.tokens(router.decode([5, 6, 7], sampling=SHORT)) == said

    def test_what_one_engine_refuses_no_engine_is_asked_for_when_it_comes(
        self, embedded: LoadedModel, tmp_path: Path
    ) -> None:
        first, second = (save_mapper(tmp_path / str(seed), embedded, seed=seed) for seed in (1, 2))
        events = EventList()
        engines = [MortalEngine(name, lambda: Engine.load(embedded, memory=MEMORY)) for name in ("a", "b")]
        router = routed(remote_engine(engines, embedded, sink=events), foremost)
        engines[1].fails_to_load = AdapterError("refused")
        with pytest.raises(AdapterError, match="refused"):
            router.load_adapter(first, "mine")
        engines[0].kill()
        router.prefill(NOTE)
        assert any(isinstance(event, EngineDown) for event in events.events)
        engines[0].revive()
        until(lambda: came(events) == 3)
        engines[1].fails_to_load = None
        router.load_adapter(second, "other")
        assert router.branches.map([router.prefill(NOTE)], "other")
        router.close()
        for engine in engines:
            engine.close()

    def test_what_is_loaded_while_an_engine_is_greeted_it_has_too(
        self, wired: WiredEngine, embedded: LoadedModel, tmp_path: Path
    ) -> None:
        events, other = EventList(), WiredEngine("b", Engine.load(embedded, memory=MEMORY))
        mapper = save_mapper(tmp_path / "one", embedded, seed=1)
        router = routed(remote_engine([other, wired], embedded, sink=events), foremost)
        note, gate = router.prefill(NOTE), wired.hold("greeted")
        wired.fails["run"] = EngineLostError("out of reach")
        other.fails["run"] = EngineFailedError("only the other is asked")
        with pytest.raises(EngineFailedError):
            router.prefill("Note.")
        assert gate.reached.wait()
        router.load_adapter(mapper, "mine")
        gate.open()
        until(lambda: came(events) == 3)
        wired.fails.clear()
        other.fails["run"] = EngineLostError("out of reach")
        assert router.branches.map([note], "mine")
        other.fails.clear()
        router.close()
        other.close()


class TestWhoComesAgain:
    def test_an_engine_that_fails_to_begin_is_asked_again(self, wired: WiredEngine, embedded: LoadedModel) -> None:
        events = EventList()
        with remote_engine([wired], embedded, sink=events) as router:
            wired.fails |= {"run": EngineLostError("gone"), "greet": EngineFailedError("CUDA out of memory")}
            asked, calling = wired.passed["greet"], ThreadPoolExecutor(1)
            answer = calling.submit(router.prefill, NOTE)
            until(lambda: wired.passed["greet"] > asked + 1)
            wired.fails.clear()
            assert answer.result().length > 0
            calling.shutdown()

    def test_an_engine_that_is_another_now_is_asked_no_more(self, wired: WiredEngine, embedded: LoadedModel) -> None:
        events = EventList()
        router = remote_engine([wired], embedded, sink=events, patience_s=0.5)
        wired.fails |= {"run": EngineLostError("gone"), "greet": EngineMismatchError("another model")}
        asked = wired.passed["greet"]
        with pytest.raises(EngineLostError, match="answered for"):
            router.prefill(NOTE)
        assert wired.passed["greet"] == asked + 1
        router.close()

    def test_a_front_begins_anew_while_an_engine_is_gone(self, wired: WiredEngine, embedded: LoadedModel) -> None:
        events, other = EventList(), WiredEngine("b", Engine.load(embedded, memory=MEMORY))
        router = remote_engine([wired, other], embedded, sink=events)
        note = router.prefill(NOTE)
        other.fails["all"] = EngineLostError("out of reach")
        assert router.admin is not None
        router.admin.restart()
        assert router.text(router.decode("So:", [note], sampling=SHORT)).startswith("So:")
        other.fails.clear()
        until(lambda: came(events) == 4)
        wired.fails["all"] = EngineLostError("out of reach")
        assert router.text(router.decode("And:", [note], sampling=SHORT)).startswith("And:")
        wired.fails.clear()
        router.close()
        assert other.held() == (0, 0, 0)
        other.close()

    def test_what_it_counts_is_counted_once(self, wired: WiredEngine, embedded: LoadedModel) -> None:
        with remote_engine([wired], embedded) as router:
            router.decode("So:", [router.prefill(NOTE)], sampling=SHORT)
            before = router.stats()
            assert router.admin is not None
            router.admin.restart()
            router.prefill("Hi.")
            after = router.stats()
            assert after.tokens_encoded > before.tokens_encoded and after.steps > before.steps
        for words in (NOTE, "Hi."):
            events = EventList()
            with remote_engine([wired], embedded, salt="ours", sink=events) as router:
                made = router.prefill(words)
                counted = router.stats().tokens_encoded
                [done] = [event for event in events.events if isinstance(event, RequestFinished)]
                assert counted == done.tokens_encoded == made.length
        with (
            remote_engine([wired], embedded, salt="ours") as one,
            remote_engine([wired], embedded, salt="ours", sink=(events := EventList())) as other,
        ):
            made = one.prefill(NOTE)
            assert other.prefill(NOTE) == made
            [done] = [event for event in events.events if isinstance(event, RequestFinished)]
            assert (done.tokens_encoded, done.tokens_reused) == (0, made.length)
            assert (other.stats().tokens_encoded, other.stats().tokens_reused) == (0, made.length)


def test_tenants_that_end_at_the_front_end_at_its_engines(wired: WiredEngine, embedded: LoadedModel) -> None:
    owner = wired.engine.admin
    assert owner is not None
    with remote_engine([wired], embedded) as router:
        for number in range(5):
            tenant = router.tenant(f"salt {number}")
            tenant.decode("So:", [tenant.prefill(NOTE)], sampling=SHORT)
            tenant.close()
            again = router.tenant(f"salt {number}")
            assert again.text(again.prefill(NOTE)) == NOTE
            again.close()
        until(lambda: len(owner.tenants()) == 1)
        assert not wired.server._serving and wired.held() == (0, 0, 0)
        kept = router.prefill(NOTE)
        router.release(kept)
    assert len(owner.tenants()) == 1 and not wired.server._serving, "that of the router itself is gone, too"


# What comes in another order than it was sent.


async def said(server: Any, sent: SentCall) -> SentAnswer | None:
    answer = None
    async for each in server.run(sent):
        answer = each
    return answer


def call(router: str, sequence_no: int, tokens: list[int], *parents: Any, rows: tuple[Any, ...] = ()) -> SentCall:
    return SentCall(
        router, sequence_no, sequence_no, "ours", Prefill(tokens, [*parents], escape_special_tokens=False), rows
    )


async def greeted(wired: WiredEngine, *routers: str) -> None:
    for router in routers:
        await wired.server.greet(Hello(router, "", own_version()))


async def test_a_tenant_that_one_front_leaves_another_has(wired: WiredEngine) -> None:
    await greeted(wired, "one", "other")
    await said(wired.server, call("one", 1, [5, 6]))
    closing = asyncio.create_task(wired.server.close_tenant("one", "ours", FOREVER))
    await asyncio.sleep(0)
    for sequence_no in (2, 3):
        assert await said(wired.server, call("other", sequence_no, [5, 6, sequence_no])) is not None
    await closing
    assert await said(wired.server, call("other", 4, [7])) is not None


async def test_a_tenant_that_begins_again_before_its_end_arrives_goes_on(wired: WiredEngine) -> None:
    await greeted(wired, "one")
    await said(wired.server, call("one", 1, [5, 6]))
    made = await said(wired.server, call("one", 3, [7]))
    await wired.server.close_tenant("one", "ours", 2)
    assert made is not None and wired.engine._core.table.get(made.id) is not None
    assert wired.held()[0] == 1, "what it had before is gone"


async def test_a_copy_that_fails_takes_nothing_from_calls_that_came_before_it(
    wired: WiredEngine, embedded: LoadedModel
) -> None:
    source = WiredEngine("b", Engine.load(embedded, memory=MEMORY))
    await greeted(wired, "one")
    await greeted(source, "one")
    made = await said(source.server, call("one", 1, [5, 6, 7]))
    assert made is not None
    message = source.engine._core.table.get(made.id)
    assert message is not None
    row = message.kv_key()
    assert await said(wired.server, call("one", 7, [8, 9], message.handle, rows=(row,))) is not None
    assert await wired.server.import_kv(Copying("one", 5, "ours", (made.id,), (row,)), []) == ([], 0)
    assert wired.engine._core.table.get(made.id) is not None
    await wired.server.release(Releasing("one", 6, "ours", (made.id,)))
    assert wired.engine._core.table.get(made.id) is not None, "the call that reads it was sent after that"
    await wired.server.release(Releasing("one", 8, "ours", (made.id,)))
    assert wired.engine._core.table.get(made.id) is None
    source.close()


async def test_a_call_that_was_left_before_it_came_is_not_begun(wired: WiredEngine) -> None:
    await greeted(wired, "one")
    await wired.server.release(Releasing("one", 2, "ours", (), (1,)))
    assert await said(wired.server, call("one", 1, [5, 6])) is None
    assert wired.held() == (0, 0, 0)


async def test_of_two_calls_that_made_the_same_one_was_left(wired: WiredEngine) -> None:
    await greeted(wired, "one")
    first, second = [await said(wired.server, call("one", sequence_no, [5, 6])) for sequence_no in (1, 2)]
    assert first is not None and second is not None and first.id == second.id
    await wired.server.release(Releasing("one", 3, "ours", (), (1,)))
    assert wired.held()[0] == 1
    await wired.server.release(Releasing("one", 4, "ours", (first.id,)))
    assert wired.held() == (0, 0, 0)
