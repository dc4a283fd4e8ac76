"""Where a node's call stands in a run, and running async work from sync code."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from choreo_agents.graph.run import RunPlace, run_coroutine


def place(**metadata: object) -> RunPlace:
    return RunPlace.of({"metadata": metadata, "configurable": {"thread_id": "t"}}, "alone")


def test_a_place_is_read_from_langgraphs_config() -> None:
    found = place(langgraph_node="pro", langgraph_path=("__pregel_push", 3, False), langgraph_checkpoint_ns="pro:1")
    assert (found.node, found.branch, found.thread, found.task) == ("pro", 3, "t", "pro:1")
    pulled = place(langgraph_node="pro", langgraph_path=("__pregel_pull", "pro"))
    assert pulled.branch == 0


def test_outside_langgraph_everything_is_default() -> None:
    found = RunPlace.of({}, "alone")
    assert (found.node, found.branch, found.seed, found.call_name(0)) == ("alone", 0, None, None)


def test_call_seeds_depend_on_all_that_names_a_call() -> None:
    one = place(langgraph_node="pro", langgraph_path=("__pregel_push", 3, False))
    other_branch = place(langgraph_node="pro", langgraph_path=("__pregel_push", 4, False))
    other_node = place(langgraph_node="con", langgraph_path=("__pregel_push", 3, False))
    seeds = [one.call_seed(0, 1, 0), one.call_seed(1, 1, 0), one.call_seed(0, 2, 0), one.call_seed(0, 1, 1)]
    seeds += [other_branch.call_seed(0, 1, 0), other_node.call_seed(0, 1, 0)]
    assert len(set(seeds)) == 6
    assert one.call_seed(0, 1, 0) == seeds[0]


def test_a_runs_own_seed_replaces_the_engines() -> None:
    with_seed = RunPlace.of({"configurable": {"seed": 5}}, "alone")
    assert with_seed.call_seed(0, 1, 0) == with_seed.call_seed(99, 1, 0)


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
