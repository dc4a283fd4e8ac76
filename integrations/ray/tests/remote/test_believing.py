"""What a router believes of its engines is so again, whatever was given up, lost or refused meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from choreo_ray.remote import remote_engine
from remote_support.loopback import WiredEngine
from support.adapters import save_adapter, save_mapper

from choreo_agents import Decode, Engine, Memory, Sampling
from choreo_agents.errors import (
    AdapterError,
    EngineClosedError,
    EngineFailedError,
    EngineLostError,
    RequestTimeoutError,
)
from choreo_agents.models import LoadedModel

MEMORY = Memory(kv_budget_bytes=1 << 23)
SHORT = Sampling(max_tokens=2, stop_tokens=())
LONG = Sampling(temperature=1.0, max_tokens=200, stop_tokens=(), seed=7)


@pytest.fixture
def wired(embedded: LoadedModel) -> Iterator[dict[str, WiredEngine]]:
    made = {name: WiredEngine(name, Engine.load(embedded, memory=MEMORY)) for name in "ab"}
    yield made
    for each in made.values():
        each.close()


def until(what: Callable[[], object]) -> None:
    """Wait until something is so."""
    for _ in range(2000):
        if what():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to that")


def believed(router: Any) -> list[tuple[int, int, int]]:
    """Of each engine: calls that it serves, calls for which KV is on its way, and messages that it is to have."""
    replicas = router._core.execution.fleet.replicas.values()
    return [(len(each.serving), len(each.arriving_bytes), len(each.incoming)) for each in replicas]


async def test_calls_that_are_given_up_at_once_are_served_nowhere(
    wired: dict[str, WiredEngine], embedded: LoadedModel
) -> None:
    router = remote_engine([*wired.values()], embedded)
    trunk = await router.aprefill("Ann has 3 red kites. " * 4)
    drawn = random.Random(0)
    for number in range(30):
        calls = [Decode(f"So {number} {place}:", [trunk], sampling=SHORT) for place in range(40)]
        asked = asyncio.ensure_future(router.adecode(calls))
        await asyncio.sleep(0.03 * drawn.random())
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await asyncio.to_thread(until, lambda: not router.stats().unfinished)
    core: Any = router._core
    await asyncio.to_thread(until, lambda: not core.loop._tasks)
    assert believed(router) == [(0, 0, 0)] * 2 and not core.execution._dispatcher._at
    await asyncio.to_thread(router.close)


def test_an_adapter_that_engines_refuse_has_no_name(tiny: LoadedModel, tiny_path: Path, tmp_path: Path) -> None:
    one, two = (save_adapter(tmp_path / str(seed), tiny_path, seed=seed) for seed in (1, 2))
    wired = WiredEngine("a", Engine.load(tiny, memory=MEMORY))
    first, second = (remote_engine([wired], tiny, salt="s") for _ in range(2))
    first.load_adapter(one, "mine")
    with pytest.raises(AdapterError, match="the adapter name 'mine' is taken"):
        second.load_adapter(two, "mine")
    wired.fails["load_adapter"] = EngineFailedError("the disk is full")
    with pytest.raises(EngineFailedError):
        second.load_adapter(two, "other")
    wired.fails.clear()
    assert second.adapters == ()
    with pytest.raises(AdapterError, match="adapter 'mine' is not loaded"):
        second.decode([5, 6], adapter="mine", sampling=SHORT)
    assert second.load_adapter(two, "other") == "other"
    said = [
        each.tokens(each.decode([5, 6], adapter=name, sampling=SHORT))
        for each, name in [(first, "mine"), (second, "other")]
    ]
    for number, folder in enumerate((one, two)):
        with Engine.load(tiny, memory=MEMORY, adapter=folder) as alone:
            assert alone.tokens(alone.decode([5, 6], sampling=SHORT)) == said[number]
    for each in (first, second, wired):
        each.close()


def test_adapters_outlive_a_restart_and_are_kept_once(
    wired: dict[str, WiredEngine], embedded: LoadedModel, tmp_path: Path
) -> None:
    folder, router = save_mapper(tmp_path / "one", embedded, seed=1), remote_engine([wired["a"]], embedded)
    for _ in range(3):
        router.load_adapter(folder, "mine")
    assert len(router._core.execution._sent) == 1 and wired["a"].passed["load_adapter"] == 1  # type: ignore[attr-defined]
    router.admin.restart()
    assert router.branches.map([router.prefill("Ann has 3 red kites.")], "mine")
    router.close()


def test_a_front_that_restarts_takes_no_memory_for_what_its_engines_have(
    wired: dict[str, WiredEngine], embedded: LoadedModel
) -> None:
    router = remote_engine([*wired.values()], embedded)
    core, before = router._core, router._core.pool.total_tokens
    router.admin.restart()
    assert core.pool.total_tokens == before < core.total_tokens
    assert router.stats().kv_budget_bytes == sum(each.engine.stats().kv_budget_bytes for each in wired.values())
    router.close()


def test_engines_are_asked_again_after_a_restart_that_failed(
    wired: dict[str, WiredEngine], embedded: LoadedModel
) -> None:
    router = remote_engine([wired["a"]], embedded, patience_s=30)
    wired["a"].fails["greet"] = EngineLostError("gone")
    with pytest.raises(EngineLostError, match="gone"):
        router.admin.restart()
    wired["a"].fails.clear()
    assert router.prefill("Ann has 3 red kites.").length
    router.close()


def test_who_waits_for_what_a_closed_front_was_doing_is_told_so(
    wired: dict[str, WiredEngine], embedded: LoadedModel
) -> None:
    router = remote_engine([*wired.values()], embedded, patience_s=0.1)
    router.prefill("Ann has 3 red kites.")
    core: Any = router._core
    [held] = [name for name, each in core.execution.fleet.replicas.items() if each.held]
    gate = wired[held].hold("give")
    closing = threading.Thread(target=lambda: (gate.reached.wait(), router.close()))
    closing.start()
    with pytest.raises(EngineClosedError):
        core.execution.drain(held)
    gate.open()
    closing.join()


def test_what_a_front_cannot_be_told_is_refused(wired: dict[str, WiredEngine], embedded: LoadedModel) -> None:
    with pytest.raises(TypeError, match="a router has no options 'method', 'sede': see RouterOptions"):
        remote_engine([wired["a"]], embedded, sede=3, method="baseline")  # type: ignore[call-arg]


def test_a_call_that_is_over_before_its_first_step_is_served_nowhere(
    wired: dict[str, WiredEngine], embedded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = remote_engine([*wired.values()], embedded)
    core: Any = router._core
    place = core.execution._dispatcher.place

    def late(request: Any) -> Any:
        placed = place(request)
        core.loop._active.drop(request, RequestTimeoutError("it was placed too late"))
        return placed

    monkeypatch.setattr(core.execution._dispatcher, "place", late)
    with pytest.raises(RequestTimeoutError):
        router.prefill("Ann has 3 red kites.")
    until(lambda: not core.loop._tasks)
    assert believed(router) == [(0, 0, 0)] * 2 and not core.execution._dispatcher._at
    router.close()
