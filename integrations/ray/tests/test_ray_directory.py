"""A directory in actors: asked as long as it answers, and told all again when it was gone."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from choreo_ray import RayDirectory
from choreo_ray import directory as directories
from choreo_ray.directory import DirectoryActor
from ray.exceptions import ActorDiedError

from choreo_agents.errors import InvalidRequestError

IDS = [f"{number:064x}" for number in range(40)]


class Nearby:
    """The handle of an actor that is in this process; `fails` is what asking it raises, or None: it never answers."""

    def __init__(self) -> None:
        self.actor, self.asked = DirectoryActor(), 0
        self.fails: Exception | bool | None = False

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self._ask(name, arguments))

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> SimpleNamespace:
        self.asked += 1
        done: Future[Any] = Future()
        if isinstance(self.fails, Exception):
            done.set_exception(self.fails)
        elif self.fails is False:
            with pytest.raises(StopIteration) as said:
                getattr(self.actor, name)(*arguments).send(None)
            done.set_result(said.value.value)
        return SimpleNamespace(future=lambda: done)


@pytest.fixture
def nearby() -> list[Nearby]:
    return [Nearby() for _ in range(3)]


@pytest.fixture
def directory(nearby: list[Nearby]) -> RayDirectory:
    return RayDirectory(nearby)


async def test_its_shards_are_one_directory(directory: RayDirectory, nearby: list[Nearby]) -> None:
    first = await directory.report("one", "east", IDS, [])
    assert [len(each.actor._directory) > 5 for each in nearby] == [True] * 3
    await directory.report("other", "west", IDS[:20], [])
    found = await directory.holders("one", IDS)
    assert found.incarnation == first
    assert found.holders == {each: ("east", "west") if each in IDS[:20] else ("east",) for each in IDS}
    await directory.report("one", "east", [], IDS[10:])
    await directory.lost("west")
    assert (await directory.holders("one", IDS)).holders == dict.fromkeys(IDS[:10], ("east",))
    await directory.gone("one")
    assert (await directory.holders("one", IDS)).holders == {}


@pytest.mark.parametrize("fails", [ActorDiedError(), None], ids=["gone", "silent"])
async def test_what_does_not_answer_delays_and_fails_nothing(
    directory: RayDirectory, nearby: list[Nearby], fails: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "ANSWER_S", 0.02)
    before = await directory.report("one", "east", IDS, [])
    nearby[1].fails = fails
    found = await directory.holders("one", IDS)
    assert found.incarnation == before and 5 < len(found.holders) < len(IDS)
    asked = nearby[1].asked
    assert await directory.report("one", "east", [], []) == before
    assert nearby[1].asked == asked, "it rests"
    # It is back: with what it knew, but it has missed something; and with nothing.
    for actor in (nearby[1].actor, DirectoryActor()):
        nearby[1].fails, nearby[1].actor = False, actor
        monkeypatch.setattr(directory.shards[1], "_rests_until", 0.0)
        again = await directory.report("one", "east", [], [])
        assert again != before
        assert await directory.report("one", "east", IDS, []) == again
        assert len((await directory.holders("one", IDS)).holders) == len(IDS)
        before = again


async def test_who_has_never_been_answered_knows_of_no_incarnation(
    directory: RayDirectory, nearby: list[Nearby]
) -> None:
    for each in nearby:
        each.fails = ActorDiedError()
    assert (await directory.report("one", "east", IDS, []), (await directory.holders("one", IDS)).holders) == ("", {})


@pytest.mark.parametrize("shards", [0, -1, True, 1.5])
def test_shards_are_counted(shards: Any) -> None:
    with pytest.raises(InvalidRequestError, match="shards must be"):
        RayDirectory.start(shards)


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
async def test_it_is_started_again_and_told_again(alone: None) -> None:
    directory = RayDirectory.start(2)
    pids = [ray.get(each.actor.there.remote()) for each in directory.shards]
    before = await directory.report("one", "east", IDS, [])
    assert len((await directory.holders("one", IDS)).holders) == len(IDS)
    os.kill(pids[0], signal.SIGKILL)
    while (now := await directory.report("one", "east", [], [])) == before:
        await asyncio.sleep(0.2)
    assert now.split("/")[0] != before.split("/")[0] and now.split("/")[1] == before.split("/")[1]
    assert 5 < len((await directory.holders("one", IDS)).holders) < len(IDS)
    await directory.report("one", "east", IDS, [])
    assert len((await directory.holders("one", IDS)).holders) == len(IDS)
    directory.close()
