"""What the runtime counts of a step."""

from __future__ import annotations

from choreo_agents.runtime.counters import Counters, count_step
from choreo_agents.tracing import PerTenantCounters


def test_a_step_is_counted_for_all_and_for_each_as_if_it_were_alone() -> None:
    counters = PerTenantCounters(Counters)
    count_step(counters, {"a": 3, "b": 1}, {"a": 2}, {"a": 4, "b": 1, "c": 7}, 12)
    whole, of_a, of_b = counters.total, counters.so_far("a"), counters.so_far("b")
    assert (whole.steps, whole.rows, whole.decode_rows, whole.decode_unfinished) == (1, 4, 4, 12)
    assert (of_a.steps, of_a.rows, of_a.decode_steps, of_a.decode_rows, of_a.decode_unfinished) == (1, 3, 1, 3, 4)
    assert (of_b.steps, of_b.rows, of_b.decode_steps, of_b.decode_unfinished) == (1, 1, 0, 0)
    assert counters.so_far("c").steps == 0, "it had no row"
