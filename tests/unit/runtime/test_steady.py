"""Which steps may be followed on, and what tells of calls that are given up."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from choreo_agents.kv.blocks import Run
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.loop import all_decode
from choreo_agents.runtime.request import Request
from choreo_agents.runtime.step import Row

ROWS = [Row(number, (7,), 5, Segment((Run(20 * number, 20),), 0), (), True) for number in range(3)]


def test_a_step_in_which_all_that_run_sample_may_be_followed_on() -> None:
    assert all_decode(ROWS, 3)


@pytest.mark.parametrize(
    ("rows", "running"),
    [
        ([], 0),
        (ROWS, 4),
        ([*ROWS[:2], ROWS[2]._replace(samples=False)], 3),
        ([*ROWS[:2], ROWS[2]._replace(tokens=(7, 8))], 3),
    ],
    ids=["nobody", "one is not served", "one prefills", "one samples behind its prompt"],
)
def test_no_other_may(rows: list[Row], running: int) -> None:
    assert not all_decode(rows, running)


def test_each_who_waits_is_heard_once_when_he_cancels() -> None:
    told: list[int] = []
    waiting: list[Future[Any]] = [Future(), Future()]
    request = Request(1, None, None, futures=waiting)  # type: ignore[arg-type]
    for _ in range(3):
        request.watch_cancellation(lambda: told.append(1))
    waiting[1].cancel()
    assert len(told) == 1
    waiting.append(Future())
    request.watch_cancellation(lambda: told.append(1))
    waiting[2].cancel()
    waiting[0].set_result(None)
    assert len(told) == 2, "who has what he waited for has not cancelled"
