"""Calls that come together: they stay where their trunk is until the load is worth a copy, which is made once."""

from __future__ import annotations

from collections import Counter

import pytest
from support.elsewhere import load_elsewhere

from choreo_agents import Decode, Memory, Sampling
from choreo_agents.engine.elsewhere import Costs
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import CallPlaced, EventList, KVCopied

MEMORY = Memory(kv_budget_bytes=1 << 24)
SHORT = Sampling(max_tokens=4, stop_tokens=())
FREE_ROWS = Costs(copy_s=0.01, copy_bytes_per_s=1e6, encode_tokens_per_s=100.0, step_s=0.01, row_s=0.0)
DEAR_ROWS = Costs(copy_s=0.01, copy_bytes_per_s=1e9, encode_tokens_per_s=100.0, step_s=0.01, row_s=0.01)
TRUNK = [7, 9, 11] * 50


@pytest.mark.parametrize(("costs", "engines"), [(FREE_ROWS, 1), (DEAR_ROWS, 3)])
def test_branches_stay_together_or_spread_and_a_trunk_is_copied_once(
    tiny: LoadedModel, costs: Costs, engines: int
) -> None:
    events = EventList()
    front = load_elsewhere(tiny, 3, memory=MEMORY, costs=costs, sink=events)
    try:
        trunk = front.prefill(TRUNK)
        [first] = [event.engine for event in events.events if isinstance(event, CallPlaced)]
        events.events.clear()
        calls = [Decode([20 + number], [trunk], sampling=SHORT) for number in range(12)]
        said = front.decode(calls)
        placed = Counter(event.engine for event in events.events if isinstance(event, CallPlaced))
        copied = Counter(event.engine for event in events.events if isinstance(event, KVCopied))
        assert len(placed) == engines and max(placed.values()) <= 12 / engines + 2
        assert copied == Counter(dict.fromkeys(placed.keys() - {first}, 1)), "once to each of them"
        stats = front.stats()
        assert stats.tokens_recomputed == 0 and stats.tokens_encoded == 150 + 12 * 5
        assert len({tuple(front.tokens(each)) for each in said}) == 12
    finally:
        front.close()
