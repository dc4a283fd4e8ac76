"""Engines that end while calls are under way: the calls end all the same, with the words that they would have had."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from choreo_ray.remote import health_monitor, remote_engine
from remote_support.loopback import MortalEngine, WiredEngine
from support.serving import asked, client_of

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling
from choreo_agents.errors import EngineLostError, InvalidRequestError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.tracing import EngineDown, EngineUp, EventList, RequestRouted

MEMORY = Memory(kv_budget_bytes=1 << 23)
WARM = Sampling(temperature=1.0, max_tokens=24, stop_tokens=(), seed=7)


class Fleet:
    """A router over two engines that can be killed."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self.events = EventList()
        self.engines = [MortalEngine(name, lambda: Engine.load(model, memory=MEMORY)) for name in ("a", "b")]
        self.router = remote_engine(self.engines, model, sink=self.events, **options)

    def named(self, name: str) -> MortalEngine:
        return next(engine for engine in self.engines if engine.name == name)

    def placed(self) -> list[str]:
        """Where calls went, one after the other."""
        return [event.engine for event in self.events.events if isinstance(event, RequestRouted)]

    def close(self) -> None:
        self.router.check()
        self.router.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture(scope="module")
def embedded_in_bf16() -> LoadedModel:
    return load_model("embedded", dtype=torch.bfloat16)


@pytest.fixture
def fleet(embedded: LoadedModel) -> Iterator[Fleet]:
    made = Fleet(embedded)
    yield made
    made.close()


def dies_after(engine: MortalEngine, tokens: int) -> None:
    """Kill an engine once it has sent so many tokens."""

    def told(sent: int) -> None:
        if sent >= tokens and engine.lives == 1:
            engine.kill()

    engine.on_token = told


@pytest.mark.parametrize("after", [1, 9, 23])
def test_a_call_goes_on_elsewhere_from_what_was_delivered(fleet: Fleet, embedded: LoadedModel, after: int) -> None:
    with Engine.load(embedded, memory=MEMORY) as one:
        parent = one.prefill("Ann has 3 red kites.")
        expected = one.tokens(one.decode("So:", [parent], sampling=WARM))
    parent = fleet.router.prefill("Ann has 3 red kites.")
    dies_after(fleet.named(fleet.placed()[0]), after)
    told: list[str] = []
    handle: MessageHandle | None = None
    for piece in fleet.router.stream("So:", [parent], sampling=WARM):
        if isinstance(piece, MessageHandle):
            handle = piece
        else:
            told.append(piece.text)
    assert handle is not None and fleet.router.tokens(handle) == expected
    assert "".join(told) == fleet.router.text(handle, special=False).removeprefix("So:"), "each word is told once"
    first, again, *_ = fleet.placed()[1:]
    assert first != again
    # In fp32 the same tokens would be drawn again: that they are forced is seen in what is sent. An engine may have
    # sent all of its tokens before it goes: what is missing then is the answer alone.
    played = fleet.named(again).calls[-1].call.played
    sampled = list(fleet.named(first).calls[-1].call.header)
    assert played is not None and after <= len(played.tokens) <= WARM.max_tokens
    assert expected[: len(sampled) + len(played.tokens)] == [*sampled, *played.tokens]
    assert sum(isinstance(event, EngineDown) for event in fleet.events.events) == 1
    stats = fleet.router.stats()
    assert stats.tokens_recomputed >= fleet.router.usage(parent).tokens_encoded, "the parent was encoded again there"


def test_words_that_were_delivered_stand_in_bf16_too(embedded_in_bf16: LoadedModel) -> None:
    fleet = Fleet(embedded_in_bf16)
    parent = fleet.router.prefill("Ann has 3 red kites.")
    dies_after(fleet.named(fleet.placed()[0]), 9)
    *told, handle = fleet.router.stream("So:", [parent], sampling=WARM)
    assert isinstance(handle, MessageHandle) and len(set(fleet.placed()[1:])) == 2
    assert "".join(piece.text for piece in told) == fleet.router.text(handle, special=False).removeprefix("So:")
    fleet.close()


def test_a_call_with_a_memo_that_ends_elsewhere_is_remembered(fleet: Fleet) -> None:
    parent = fleet.router.prefill("Ann has 3 red kites.")
    dies_after(fleet.named(fleet.placed()[0]), 9)
    call = Decode("So:", [parent], sampling=WARM, idempotency_key="the first of the run")
    [first] = fleet.router.decode([call])
    placed = fleet.placed()
    assert len(placed) == 3 and len(set(placed)) == 2
    assert fleet.router.decode([call]) == [first] and fleet.placed() == placed, "nobody is asked again"


def test_what_an_engine_had_is_computed_again_when_it_is_read(fleet: Fleet) -> None:
    first = fleet.router.prefill("Ann has 3 red kites.")
    second = fleet.router.decode("So:", [first], sampling=WARM)
    words = fleet.router.text(second)
    lost = fleet.named(fleet.placed()[0])
    lost.kill()
    third = fleet.router.decode("And:", [second], sampling=WARM)
    assert fleet.router.text(second) == words and fleet.router.usage(third).tokens_recomputed >= len(
        fleet.router.tokens(second)
    )
    lost.revive()
    _until(lambda: sum(isinstance(e, EngineUp) and e.engine == lost.name for e in fleet.events.events) == 2)
    assert fleet.router.text(fleet.router.decode("And:", [second], sampling=WARM)) == fleet.router.text(third)


def test_a_call_that_ends_two_engines_is_refused_by_name(fleet: Fleet) -> None:
    for engine in fleet.engines:
        dies_after(engine, 3)
    with pytest.raises(EngineLostError, match=r"decode \d+ of 'ann' was running on engines '.' and '.'"):
        fleet.router.decode([Decode("So:", author="ann", sampling=WARM)])
    assert fleet.router.stats().messages == 0


def test_calls_wait_for_an_engine_to_come_back(fleet: Fleet) -> None:
    handle = fleet.router.prefill("Ann has 3 red kites.")
    for engine in fleet.engines:
        engine.kill()
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.append(fleet.router.text(fleet.router.decode("So:", [handle], sampling=WARM)))
    )
    waiting.start()
    _until(lambda: sum(isinstance(event, EngineDown) for event in fleet.events.events) == 2)
    fleet.engines[1].revive()
    waiting.join(60)
    assert len(found) == 1 and found[0].startswith("So:")


def test_calls_end_if_none_comes_back(embedded: LoadedModel) -> None:
    fleet = Fleet(embedded, patience_s=0.2)
    for engine in fleet.engines:
        engine.kill()
    with pytest.raises(EngineLostError, match=r"none of the engines 'a', 'b' answered for 0.2 s"):
        fleet.router.prefill("Ann has 3 red kites.")
    fleet.close()


async def test_a_server_is_ready_only_while_an_engine_answers(embedded: LoadedModel) -> None:
    fleet = Fleet(embedded, patience_s=0.2)
    async with client_of(fleet.router) as client:
        assert (await client.get("/health")).status_code == 200
        for engine in fleet.engines:
            engine.kill()  # while the router is idle: no call notices it
        response = await client.get("/health")
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_lost"
        assert "none of 2 engines answers" in response.json()["error"]["message"]
        assert (await asked(client, 503))["error"]["code"] == "engine_lost", "it waits for the router's patience"
        fleet.engines[1].revive()
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(fleet.close)


async def test_an_engine_that_hangs_is_not_ready(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_monitor, "PROBE_S", 0.01)
    engine = WiredEngine("a", Engine.load(embedded, memory=MEMORY))
    router = remote_engine([engine], embedded)
    gate = engine.hold("release")
    with pytest.raises(EngineLostError, match="none of 1 engines answers"):
        await asyncio.to_thread(router.admin.require_ready)
    gate.open()
    monkeypatch.undo()
    await asyncio.to_thread(router.admin.require_ready)
    router.close()
    engine.close()


async def test_who_is_gone_is_asked_less_and_less_often(embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    sleep = asyncio.sleep

    async def at_once(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0.0 if len(waited) < 14 else seconds)

    monkeypatch.setattr(health_monitor, "asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": at_once})))
    fleet = Fleet(embedded)
    await asyncio.to_thread(fleet.router.prefill, "Ann has 3 red kites.")
    fleet.named(fleet.placed()[0]).kill()
    await asyncio.to_thread(fleet.router.prefill, "Bob has none.")  # it is noticed by who would go there
    while len(waited) < 14:
        await sleep(0.01)
    await asyncio.to_thread(fleet.close)
    assert waited[:14] == pytest.approx([min(0.1 * 2**number, 30.0) for number in range(14)])


def _until(holds: Any) -> None:
    for _ in range(1000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to that")


def test_an_engine_that_is_to_be_ended_hands_over_what_it_has(fleet: Fleet) -> None:
    core: Any = fleet.router._core
    trunk = fleet.router.prefill("Ann has 3 red kites.")
    answer = fleet.router.decode("So:", [trunk], sampling=WARM)
    leaving = fleet.placed()[0]
    [other] = {"a", "b"} - {leaving}
    assert core.execution.drain(leaving) == 2
    again = fleet.router.decode("And:", [answer, trunk], sampling=WARM)
    assert fleet.placed()[-1] == other and fleet.router.usage(again).tokens_recomputed == 0
    fleet.named(leaving).kill()
    with pytest.raises(InvalidRequestError, match=f"'{other}' is the only one that is up"):
        core.execution.drain(other)
    with pytest.raises(InvalidRequestError, match=r"there is no engine 'z': use one of '.'"):
        core.execution.drain("z")
