"""What one step admits and encodes, by example."""

import ast
import inspect

import pytest

from choreo_agents.runtime import scheduler
from choreo_agents.runtime.scheduler import FirstComeFirstServed, Limits, Plan, Running, Waiting

plan_step = FirstComeFirstServed().plan
LIMITS = Limits(max_batched_tokens=10, max_num_seqs=4)


def test_a_long_prefill_leaves_a_token_to_everyone_after_it() -> None:
    plan = plan_step([], [Running(0, 100), Running(1, 1), Running(2, 100)], 0, LIMITS)
    assert plan.chunks == ((0, 8), (1, 1), (2, 1))


def test_prefills_share_what_is_left_in_order() -> None:
    plan = plan_step([], [Running(0, 4), Running(1, 6), Running(2, 6)], 0, LIMITS)
    assert plan.chunks == ((0, 4), (1, 5), (2, 1))


def test_an_admitted_request_is_served_in_the_same_step() -> None:
    plan = plan_step([Waiting(7, room=16, pending=3)], [Running(1, 1)], 16, LIMITS)
    assert plan == Plan(admitted=(7,), stuck=(), chunks=((1, 1), (7, 3)))


def test_a_request_that_fits_does_not_overtake_one_that_does_not() -> None:
    plan = plan_step([Waiting(0, 16), Waiting(1, 48), Waiting(2, 16)], [], 32, LIMITS)
    assert plan.admitted == (0,) and plan.stuck == ()


def test_a_request_that_is_not_ready_is_passed_over_whatever_it_needs() -> None:
    plan = plan_step([Waiting(0, 999, ready=False), Waiting(1, 16)], [Running(5, 1)], 16, LIMITS)
    assert plan.admitted == (1,)


def test_when_nothing_runs_one_that_fits_goes_first_alone() -> None:
    """It gives memory back when it ends; two at once could keep the first waiting for ever."""
    plan = plan_step([Waiting(0, 48), Waiting(1, 64), Waiting(2, 16), Waiting(3, 16)], [], 32, LIMITS)
    assert plan.admitted == (2,) and plan.stuck == ()
    assert plan_step([Waiting(0, 48), Waiting(2, 16)], [Running(9, 1)], 32, LIMITS).admitted == ()


def test_a_request_is_stuck_only_when_nothing_gives_memory_back() -> None:
    assert plan_step([Waiting(3, 48)], [], 32, LIMITS).stuck == (3,)
    assert plan_step([Waiting(3, 48)], [Running(1, 1)], 32, LIMITS).stuck == ()
    assert plan_step([Waiting(1, 16), Waiting(3, 48)], [], 32, LIMITS).stuck == ()
    assert plan_step([Waiting(3, 48), Waiting(4, 64)], [], 32, LIMITS).stuck == (3,)


def test_no_more_rows_are_served_than_allowed() -> None:
    waiting = [Waiting(number, 16) for number in range(9)]
    assert plan_step(waiting, [Running(20, 1)], 1000, LIMITS).admitted == (0, 1, 2)
    assert plan_step(waiting, [Running(20, 1)], 1000, Limits(max_batched_tokens=2, max_num_seqs=4)).admitted == (0,)


def test_an_idle_engine_plans_nothing() -> None:
    assert plan_step([], [], 100, LIMITS) == Plan((), (), ())


@pytest.mark.parametrize("room", ["torch", "numpy", "transformers"])
def test_the_scheduler_touches_no_tensors(room: str) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(scheduler))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported and room not in imported
