"""What runs in an actor, in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from choreo_ray import actor as actors
from choreo_ray.actor import EngineActor, Loading, Sender, SomeTokens
from choreo_ray.remote import Copying, Hello, SentCall
from choreo_ray.remote.protocol import own_version
from ray.exceptions import OwnerDiedError

from choreo_agents import Decode, Memory, Sampling
from choreo_agents.errors import (
    DeviceLostError,
    EngineFailedError,
    EngineLostError,
    EngineMismatchError,
    InvalidRequestError,
)
from choreo_agents.sampling import SampledToken

GREETING = Hello("front", "", own_version())


@pytest.fixture
async def actor(tiny_path: Path) -> AsyncIterator[EngineActor]:
    made = EngineActor("engine-0", Loading(str(tiny_path), 1, {"memory": Memory(kv_budget_bytes=1 << 20)}))
    yield made
    await made.close()


async def sender(actor: EngineActor) -> Sender:
    incarnation, _ = await actor.greet(GREETING)
    return Sender("front", incarnation)


async def test_it_knows_only_who_has_greeted_it_as_it_is_now(actor: EngineActor) -> None:
    known = await sender(actor)
    await actor.release(known, [])
    for unknown in (Sender("other", known.incarnation), Sender("front", "of before"), Sender("", "")):
        with pytest.raises(EngineLostError, match="'engine-0' was restarted"):
            await actor.release(unknown, [])
    again = EngineActor("engine-0", actor._loading)
    with pytest.raises(EngineLostError):
        await again.release(known, [])


async def test_a_front_of_another_version_is_refused(actor: EngineActor) -> None:
    with pytest.raises(EngineMismatchError, match="install the same version"):
        await actor.greet(Hello("front", "", "0.0.9"))
    with pytest.raises(EngineLostError):
        await actor.release(Sender("front", actor._incarnation), [])


async def test_what_is_there_at_once_is_one_item(actor: EngineActor) -> None:
    known = await sender(actor)
    _, router = actor._require_known(known)
    heard = actor.listen(known)
    router.queue(1, 4, [SampledToken(5)])
    router.queue(2, 0, [])
    router.queue(1, 5, [SampledToken(7)])
    assert await anext(heard) == {1: SomeTokens(4, (SampledToken(5), SampledToken(7))), 2: SomeTokens(0)}
    asyncio.get_running_loop().call_later(0.01, router.queue, 3, 0, [SampledToken(8)])
    assert await anext(heard) == {3: SomeTokens(0, (SampledToken(8),))}
    await heard.aclose()


async def test_who_asks_again_for_what_is_said_is_there(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "LISTEN_S", 0.01)
    known = await sender(actor)
    _, router = actor._require_known(known)
    before = router.listens
    assert [each async for each in actor.listen(known)] == []
    await actor._give_up("front", router, before)
    await actor.release(known, [])
    await actor._give_up("front", router, router.listens)
    with pytest.raises(EngineLostError):
        await actor.release(known, [])


async def test_what_a_front_had_goes_when_it_does_not(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    await sender(actor)
    server, router = actor._server, actor._routers["front"]
    assert server is not None
    router.salts.add("salt")
    tenant = (await server._serving_of("front", "salt")).tenant
    monkeypatch.setattr(actors, "GONE_S", 0.01)
    actor._expect("front")
    while not tenant.closed:
        await asyncio.sleep(0.01)
    assert not actor._routers


@pytest.mark.parametrize("again", [True, False], ids=["greets-again", "is-gone"])
async def test_calls_end_whose_front_has_given_them_up(actor: EngineActor, again: bool) -> None:
    known = await sender(actor)
    long = Decode([5, 6], sampling=Sampling(max_tokens=100, forced_token_ids=[7] * 100))
    call = asyncio.create_task(actor.run(known, SentCall("front", 1, 0, "salt", long, ())))
    heard = actor.listen(known)
    assert 1 in await anext(heard), "it has begun"
    if again:
        assert (await actor.greet(GREETING))[0] == known.incarnation
    else:
        router = actor._routers["front"]
        await actor._give_up("front", router, router.listens)
    with pytest.raises(asyncio.CancelledError):
        await call
    while (await actor.stats()).unfinished:
        await asyncio.sleep(0.01)
    await heard.aclose()


async def test_what_is_lost_on_its_way_is_not_taken(actor: EngineActor) -> None:
    async def lost() -> Any:
        raise OwnerDiedError("00" * 28, None, "")

    known = await sender(actor)
    assert await actor.export_kv(known, Copying("front", 0, "salt", ("a" * 64,), ())) == []
    assert await actor.import_kv(known, Copying("front", 1, "salt", (), ()), [lost()]) == ([], 0)


async def test_what_was_said_of_a_call_is_not_said_of_it_when_it_is_sent_again(actor: EngineActor) -> None:
    known = await sender(actor)
    said = Decode([5, 6], sampling=Sampling(max_tokens=3, forced_token_ids=[7, 8, 9]))
    await actor.run(known, SentCall("front", 1, 4, "salt", said, ()))  # and nobody has listened
    await actor.greet(GREETING)
    await actor.run(known, SentCall("front", 2, 4, "salt", said, ()))
    heard = actor.listen(known)
    told = await anext(heard)
    assert [chosen.token for chosen in told[2].tokens] == [7, 8, 9], "of the second sending"
    await heard.aclose()


async def test_a_process_whose_engine_has_failed_ends(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    known = await sender(actor)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(actors, "_SOON_S", 0.0)
    loop: Any = actor._engine._core.loop  # type: ignore[union-attr]
    loop._end(EngineFailedError("the bookkeeping has failed"))
    call = SentCall("front", 1, 4, "salt", Decode([5, 6], sampling=Sampling(max_tokens=3)), ())
    with pytest.raises(EngineLostError, match="has ended: the bookkeeping has failed"):
        await actor.run(known, call)
    await asyncio.sleep(0.01)
    assert ended == [1]


async def test_a_process_whose_device_is_lost_ends(actor: EngineActor, monkeypatch: pytest.MonkeyPatch) -> None:
    known = await sender(actor)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(actors, "_SOON_S", 0.0)

    async def run(sent: Any) -> Any:
        yield ()
        raise DeviceLostError("the device computes no more")

    monkeypatch.setattr(actor._server, "run", run)
    with pytest.raises(EngineLostError, match="has ended: the device computes no more"):
        await actor.run(known, _Sent())  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert ended == [1]


class _Sent:
    router, salt, sequence_no = "front", "salt", 1


@pytest.mark.parametrize("threads", [0, -1, 1.5, True])
def test_threads_are_counted(threads: Any) -> None:
    with pytest.raises(InvalidRequestError, match="threads must be"):
        Loading("embedded", threads)
