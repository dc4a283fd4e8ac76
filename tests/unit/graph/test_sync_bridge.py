"""Running async work from sync code."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from choreo_agents.graph.sync_bridge import run_coroutine

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def read_variable() -> str:
    await asyncio.sleep(0)
    return variable.get()


def test_sync_code_runs_async_work_in_its_own_context() -> None:
    variable.set("outer")
    assert run_coroutine(read_variable()) == "outer"


async def test_so_it_does_under_a_running_loop() -> None:
    variable.set("inner")
    assert run_coroutine(read_variable()) == "inner"


async def test_errors_come_back_from_the_bridge() -> None:
    async def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_coroutine(fail())
