"""What calls and copies cost, measured on stand-ins that take what the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from choreo_ray import actor as actors
from choreo_ray import measuring
from choreo_ray.actor import EngineActor, Loading
from choreo_ray.measuring import measured_costs

from choreo_agents.engine.elsewhere import Costs

CALL_S, GIVE_S, TAKE_S, COPY_BYTES_PER_S = 3e-3, 5e-3, 7e-3, 2.5e8
MAKES_BYTES_PER_S = 3.5e8


class Timed:
    """An actor's handle, and the clock by which it takes its time."""

    now = 0.0

    def __init__(self) -> None:
        self.made: set[int] = set()

    @property
    def there(self) -> SimpleNamespace:
        return self._taking(lambda: (CALL_S, 1))

    @property
    def weight(self) -> SimpleNamespace:
        def give(nbytes: int) -> tuple[float, list[int]]:
            making_s = 0.0 if nbytes in self.made else nbytes / MAKES_BYTES_PER_S
            self.made.add(nbytes)
            return GIVE_S + making_s + nbytes / (2 * COPY_BYTES_PER_S), [nbytes]

        return self._taking(give)

    @property
    def weighed(self) -> SimpleNamespace:
        return self._taking(lambda given: (TAKE_S + sum(given) / (2 * COPY_BYTES_PER_S), sum(given)))

    def _taking(self, work: Callable[..., tuple[float, Any]]) -> SimpleNamespace:
        def remote(*arguments: Any) -> Any:
            seconds, answer = work(*arguments)
            Timed.now += seconds
            return answer

        return SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the stand-ins."""
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: Timed.now))


def test_a_copy_costs_what_giving_and_taking_do_and_its_bytes_what_they_take_more() -> None:
    found = measured_costs([Timed(), Timed(), Timed()])
    assert found.call_s == pytest.approx(CALL_S)
    assert found.copy_s == pytest.approx(GIVE_S + TAKE_S, rel=0.01)
    assert found.copy_bytes_per_s == pytest.approx(COPY_BYTES_PER_S)


def test_one_alone_copies_nothing() -> None:
    assert measured_costs([Timed()]) == Costs(call_s=pytest.approx(CALL_S))


async def test_what_is_copied_is_made_once_and_not_where_calls_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, bool]] = []
    put: list[tuple[bytes, bool]] = []

    def make(nbytes: int) -> bytes:
        made.append((nbytes, threading.current_thread() is threading.main_thread()))
        return bytes(nbytes)

    def keep(data: bytes) -> int:
        put.append((data, threading.current_thread() is threading.main_thread()))
        return len(put)

    monkeypatch.setattr(actors.os, "urandom", make)
    monkeypatch.setattr(ray, "put", keep)
    actor = EngineActor("engine-0", Loading("embedded", 1))
    made.clear()  # a thread may have drawn its own
    assert [await actor.weight(64) for _ in range(3)] == [[1], [2], [3]]
    assert made == [(64, False)] and put == [(bytes(64), False)] * 3
