"""Fronts over actors of this process: what is told between them, and what is when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import ray
from choreo_ray import actor as actors
from choreo_ray import client as far_engines
from choreo_ray.actor import EngineActor, Loading
from choreo_ray.client import RayEngineClient
from choreo_ray.remote import Costs, Hello, SentAnswer, SentCall, remote_engine
from choreo_ray.remote.protocol import own_version
from choreo_ray.remote.routing import CallToPlace, EngineAhead, Route
from ray import exceptions as ray_errors
from remote_support.loopback import routed
from support.ray_nearby import NearbyActor

from choreo_agents import Decode, Engine, Memory, MessageHandle, Sampling
from choreo_agents.errors import EngineMismatchError
from choreo_agents.tracing import EventList, KVCopied, RequestRouted

GREETING = Hello("front", "", own_version())
FORCED = tuple(range(5, 205))
_SOON_S = 10.0
LONG = Sampling(max_tokens=len(FORCED), forced_token_ids=FORCED)


@pytest.fixture(autouse=True)
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Ray is told to cancel."""
    found: list[Any] = []
    monkeypatch.setattr(ray, "cancel", found.append)
    monkeypatch.setattr(far_engines, "_AGAIN_S", 0.0)
    return found


@pytest.fixture
def loading(tiny_path: Path) -> Loading:
    return Loading(str(tiny_path), 1, {"memory": Memory(kv_budget_bytes=1 << 22)})


@pytest.fixture
async def actor(loading: Loading) -> AsyncIterator[NearbyActor]:
    made = NearbyActor(EngineActor("engine-0", loading))
    yield made
    await made.actor.close()


async def pieces(far: RayEngineClient) -> list[Sequence[int]]:
    """The tokens of a long call, as they are told."""
    call = SentCall("front", 0, 1, "salt", Decode([5, 6], sampling=LONG), ())
    told = [[each.token for each in some] async for some in far.run(call) if not isinstance(some, SentAnswer)]
    assert [token for each in told for token in each][-len(FORCED) :] == [*FORCED]
    return [each for each in told if each]


async def test_a_front_that_outlives_a_stream_asks_for_the_next(
    actor: NearbyActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "LISTEN_S", 0.02)
    far = RayEngineClient("engine-0", actor)
    await far.greet(GREETING)
    async with asyncio.timeout(_SOON_S):
        while actor.asked.count("listen") < 3:
            await asyncio.sleep(0.01)
    assert len(await pieces(far)) > 1, "tokens come before the answer does"
    assert actor.asked.count("greet") == 1


async def test_a_front_whose_stream_has_failed_asks_for_the_next(actor: NearbyActor, cancelled: list[Any]) -> None:
    failing = [ray_errors.ActorUnavailableError("no network", None), ray_errors.ObjectLostError("00" * 28, None, "")]

    def fail(method: str) -> None:
        if method == "listen" and failing:
            raise failing.pop()

    actor.fails = fail
    far = RayEngineClient("engine-0", actor)
    await far.greet(GREETING)
    async with asyncio.timeout(_SOON_S):
        while actor.asked.count("listen") < 3:
            await asyncio.sleep(0)
    assert len(await pieces(far)) > 1 and len(cancelled) == 2, "what is merely dropped would take what the next is for"


@pytest.mark.parametrize("gone", [None, ray_errors.ActorDiedError()], ids=["knows-nothing-of-before", "died"])
async def test_nobody_asks_who_is_gone(actor: NearbyActor, gone: Exception | None) -> None:
    far = RayEngineClient("engine-0", actor)

    def fail(method: str) -> None:
        if method == "listen":
            actor.actor._routers.clear()
            if gone is not None:
                raise gone

    actor.fails = fail
    await far.greet(GREETING)
    assert far._listening is not None
    await asyncio.wait_for(far._listening, _SOON_S)
    assert actor.asked.count("listen") == 1


async def test_a_front_of_another_version_is_refused_whenever_it_greets(
    actor: NearbyActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_engines, "own_version", lambda: "0.0.9")
    with pytest.raises(EngineMismatchError, match=r"its router 0\.0\.9: install the same version"):
        await RayEngineClient("engine-0", actor).greet(GREETING)
    assert actor.asked == ["meet"]


class Pair:
    """A router over two actors; the first call goes to the one, and all others to the other, with what they read.

    Args:
        loading: What both load.
    """

    def __init__(self, loading: Loading) -> None:
        self.actors = [EngineActor(f"engine-{number}", loading) for number in range(2)]
        self.events = EventList()
        far = [RayEngineClient(f"engine-{number}", NearbyActor(each)) for number, each in enumerate(self.actors)]
        self._placed = 0
        self.router: Engine = routed(remote_engine(far, loading.model, sink=self.events), self._route)

    def encoded(self) -> int:
        """Tokens, by both: what was encoded before included."""
        every = [each._engine.admin.stats() for each in self.actors]  # type: ignore[union-attr]
        return sum(each.tokens_encoded + each.tokens_recomputed for each in every)

    def of(self, kind: type[Any]) -> list[Any]:
        """Events."""
        return [each for each in self.events.events if isinstance(each, kind)]

    def close(self) -> None:
        self.router.close()
        for each in self.actors:
            asyncio.run(each.close())

    def _route(self, call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
        name = engines[min(self._placed, len(engines) - 1)].name
        self._placed += 1
        reads = [each for each in call.reads if each.holders and name not in each.holders]
        copies = {each.id: next(iter(each.holders)) for each in reads}
        return Route(name, copies, (), sum(each.nbytes for each in reads), 0, 0.0)


@pytest.fixture
def pair(loading: Loading) -> Iterator[Pair]:
    made = Pair(loading)
    yield made
    made.router.check()
    made.close()


def stored(parcels: Any) -> Any:
    async def found() -> Any:
        return parcels

    return found()


def full(error: Exception) -> Callable[[Any], Any]:
    def put(parcels: Any) -> Any:
        raise error

    return put


@pytest.mark.parametrize(
    ("put", "refused"),
    [
        (stored, 0),
        (full(ray_errors.ObjectStoreFullError("no room")), 1),
        (full(ray_errors.OutOfDiskError("no room")), 1),
    ],
    ids=["room", "full", "full-disk"],
)
def test_kv_that_has_no_room_on_its_way_is_encoded_again(
    pair: Pair, put: Callable[[Any], Any], refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "put", put)
    note = pair.router.prefill([7] * 60)
    before = pair.encoded()
    assert before == 60
    answer = pair.router.decode([8, 9], [note], sampling=Sampling(max_tokens=4, forced_token_ids=(5, 6, 7, 8)))
    assert pair.router.tokens(answer)[-4:] == [5, 6, 7, 8]
    assert pair.encoded() - before == len(pair.router.tokens(answer)) + 60 * refused
    [copied] = pair.of(KVCopied)
    assert (copied.messages, copied.refused, bool(copied.bytes)) == (1, refused, not refused)


def test_a_call_that_its_actor_has_given_up_is_run_elsewhere(pair: Pair) -> None:
    pair.router.prefill([7] * 3)
    stream = pair.router.stream([8, 9], sampling=LONG)
    told = list(islice(stream, 2))
    [placed] = [each.engine for each in pair.of(RequestRouted)][1:]
    [given_up] = [each for each in pair.actors if each._name == placed]

    async def give_up() -> int:
        calls = [len(each.calls) for each in given_up._routers.values()]
        for each in given_up._routers.values():
            each.cancel()
        return sum(calls)

    assert pair.router._core.loop.wait_for(give_up()) == 1, "it is under way"  # type: ignore[attr-defined]
    *rest, handle = stream
    assert isinstance(handle, MessageHandle) and pair.router.tokens(handle)[-len(FORCED) :] == [*FORCED]
    assert len(told) + len(rest) > 2 and len(pair.of(RequestRouted)) == 3
