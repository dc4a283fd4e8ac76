"""What is left of a pass that failed."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch

from choreo_agents.kv.blocks import Run
from choreo_agents.kv.segment import Segment
from choreo_agents.runtime.executor import StepRetry, is_out_of_memory
from choreo_agents.runtime.step import Row, Step


def rows(count: int, tokens: int = 2) -> list[Row]:
    """Of requests that read nothing."""
    return [Row(at, (1,) * tokens, 0, Segment((Run(16 * at, 16),), 0), (), samples=False) for at in range(count)]


class Narrow:
    """An executor that runs out of memory in passes of more than two tokens, and keeps watch over what they hold."""

    def __init__(self, wraps: bool) -> None:
        self.wraps = wraps
        self.made: list[ref[torch.Tensor]] = []
        self.held: list[int] = []
        """How much of earlier passes was still there when one began, and when memory was to be freed."""

    def answers(self) -> bool:
        return True

    def free_cached(self) -> None:
        self.held.append(sum(each() is not None for each in self.made))

    def run(self, step: Step, samplers: Any) -> dict[int, Any]:
        self.free_cached()
        return self._computed(len(step.tokens))

    def _computed(self, tokens: int) -> dict[int, Any]:
        activations = torch.zeros(tokens)
        self.made.append(ref(activations))
        try:
            return self._attended(activations)
        except RuntimeError as error:
            if self.wraps:
                raise ValueError("as a library tells it") from error
            raise

    def _attended(self, activations: torch.Tensor) -> dict[int, Any]:
        scores = activations * 2
        self.made.append(ref(scores))
        if len(scores) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return {}


@pytest.mark.parametrize("wraps", [False, True])
def test_what_a_failed_pass_computed_with_is_gone_when_its_halves_are_run(wraps: bool) -> None:
    """Its error is kept, to be told of, and would keep the memory that the halves are to have."""
    executor = Narrow(wraps)
    ran = StepRetry(executor).run(rows(4), [], {})  # type: ignore[arg-type]
    assert not ran.failed and len(ran.passes) >= 3, "the whole, and each half"
    assert executor.held and not any(executor.held)
    assert all(error.__traceback__ is not None for *_, error in ran.passes), "where it failed is told still"


class TooLong:
    """An executor that has no memory for what one request reads, however few its tokens."""

    passes = 0

    def answers(self) -> bool:
        return True

    def free_cached(self) -> None: ...

    def run(self, step: Step, samplers: Any) -> dict[int, Any]:
        self.passes += 1
        if any(row.number == 0 for row in step.rows):
            raise torch.OutOfMemoryError("out of memory")
        return {}


def test_who_has_no_memory_alone_makes_no_step_of_others_smaller() -> None:
    """What it lacks is not for want of smaller passes: all would decode a row at a time, long after it was given up."""
    executor, calls = TooLong(), rows(16, tokens=1)
    attempts = StepRetry(executor)  # type: ignore[arg-type]
    assert set(attempts.run(calls, [], {}).failed) == {0}
    executor.passes = 0
    for _ in range(100):
        assert not attempts.run(calls[1:], [], {}).failed
    assert executor.passes == 100


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    error = ValueError("again and again")
    error.__cause__ = error
    assert not is_out_of_memory(error)
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)
