"""What the runtime counts of a step."""

from __future__ import annotations

from typing import ClassVar

from choreo_agents.runtime.counters import Counters, count_step
from choreo_agents.tracing import Ledger


class Name(str):
    """A tenant's, which counts how often it is compared."""

    compared: ClassVar[int] = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def test_a_step_of_many_tenants_is_counted_in_time_of_its_calls() -> None:
    """After each step, before the next can begin."""
    names = [f"tenant {at}" for at in range(100)]
    counters = Ledger(Counters)
    count_step(counters, [(name, True) for name in names], [Name(name) for name in names * 10], 1000)
    assert all(counters.own(name).decode_unfinished == 10 for name in names)
    assert counters.total.decode_unfinished == 1000 and Name.compared <= 4 * 1000
