"""An engine in an actor as its router has it, without the actor."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from choreo_ray import client as far_engines
from choreo_ray.actor import SomeTokens
from choreo_ray.client import RayEngineClient
from choreo_ray.remote import Releasing, SentAnswer, SentCall
from ray.exceptions import ActorUnavailableError, TaskCancelledError

from choreo_agents import Decode
from choreo_agents.engine.messages.message import Usage
from choreo_agents.errors import EngineFailedError, EngineLostError
from choreo_agents.sampling import SampledToken

A, B, C = SampledToken(1), SampledToken(2), SampledToken(3)
ANSWER = SentAnswer("id", (1, 2, 3), (A, B, C), "stop", Usage(0, 0, None, 0.0), {})
CALL = SentCall("front", 7, 0, "salt", Decode([5]), ())


class Told:
    """An actor's handle that keeps what it is asked, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: list[Future[Any]] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self._ask(name, arguments))

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.asked.append((name, arguments))
        self.answers.append(answer := Future[Any]())

        class Reference:
            def future(self) -> Future[Any]:
                return answer

            def __await__(self) -> Any:
                return asyncio.wrap_future(answer).__await__()

        return Reference()


@pytest.fixture
def actor() -> Told:
    return Told()


@pytest.fixture
def far(actor: Told) -> RayEngineClient:
    return RayEngineClient("engine-0", actor)


async def heard(far: RayEngineClient, actor: Told, *some: SomeTokens, answer: Any) -> list[Any]:
    """What a call says of which so much is heard, and then its answer comes."""
    said: list[Any] = []

    async def listen() -> None:
        async for each in far.run(CALL):
            said.append(each)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    for each in some:
        far._calls[7].put_nowait(each)
        await asyncio.sleep(0)
    if isinstance(answer, Exception):
        actor.answers[-1].set_exception(answer)
    else:
        actor.answers[-1].set_result(answer)
    try:
        await listening
    except (EngineLostError, EngineFailedError) as error:
        said.append(type(error))
    return said


async def test_each_token_comes_once_whatever_was_lost_or_said_twice(far: RayEngineClient, actor: Told) -> None:
    whole = ((A, B, C), ANSWER)
    assert await heard(far, actor, answer=whole) == [(A, B, C), ANSWER]
    assert await heard(far, actor, SomeTokens(0), SomeTokens(0, (A,)), answer=whole) == [(), (A,), (B, C), ANSWER]
    twice = (SomeTokens(0, (A, B)), SomeTokens(1, (B, C)))
    assert await heard(far, actor, *twice, answer=whole) == [(A, B), (C,), ANSWER]
    gap = (SomeTokens(0, (A,)), SomeTokens(2, (C,)))
    assert await heard(far, actor, *gap, answer=whole) == [(A,), (B, C), ANSWER]
    assert not far._calls


async def test_a_call_of_which_nothing_was_heard_is_taken_for_the_culprit_the_second_time(
    far: RayEngineClient, actor: Told
) -> None:
    lost = ActorUnavailableError("restarting", None)
    assert await heard(far, actor, answer=lost) == [EngineLostError]
    assert await heard(far, actor, answer=lost) == [(), EngineLostError]
    assert await heard(far, actor, SomeTokens(0), answer=lost) == [(), EngineLostError], "it had begun"


async def test_a_call_that_its_actor_has_given_up_is_lost_and_no_culprit(far: RayEngineClient, actor: Told) -> None:
    for _ in range(2):
        assert await heard(far, actor, answer=TaskCancelledError()) == [EngineLostError]


async def test_what_was_said_before_a_call_failed_is_told(far: RayEngineClient, actor: Told) -> None:
    failed = ((A, B, C), EngineFailedError("it is cut"))
    assert await heard(far, actor, SomeTokens(0, (A,)), answer=failed) == [(A,), (B, C), EngineFailedError]


async def test_who_leaves_a_call_ends_it(far: RayEngineClient, actor: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(ray, "cancel", ended.append)
    run = far.run(CALL)
    waiting = asyncio.ensure_future(anext(run))
    await asyncio.sleep(0)
    far._calls[7].put_nowait(SomeTokens(0, (A,)))
    assert await waiting == (A,)
    await run.aclose()
    assert len(ended) == 1 and not far._calls
    await heard(far, actor, answer=((A,), ANSWER))
    assert len(ended) == 1, "nothing is left of one that has ended"


async def test_releases_go_together(far: RayEngineClient, actor: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_engines, "_RELEASE_S", 0.0)
    gone = [Releasing("front", number, "salt", (f"{number}",)) for number in range(3)]
    telling = [asyncio.ensure_future(far.release(each)) for each in gone]
    while not actor.answers:
        await asyncio.sleep(0)
    actor.answers[0].set_result(None)
    await asyncio.gather(*telling)
    assert actor.asked == [("release", (far._sender, gone))]


async def test_a_front_that_closes_has_told_of_its_releases(far: RayEngineClient, actor: Told) -> None:
    gone = Releasing("front", 1, "salt", ("id",))
    telling = asyncio.ensure_future(far.release(gone))
    await asyncio.sleep(0)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling
    assert actor.asked == [("release", (far._sender, [gone]))]
