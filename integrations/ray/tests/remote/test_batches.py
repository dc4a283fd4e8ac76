"""Calls that come together: they stay where their trunk is until the load is worth a copy, which is made once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from choreo_ray.remote import Costs
from remote_support.loopback import load_loopback

from choreo_agents import END, START, Agent, ChoreoGraph, Decode, Memory, Sampling, Send, Worker
from choreo_agents.models import LoadedModel
from choreo_agents.tracing import EventList, KVCopied, RequestRouted

MEMORY = Memory(kv_budget_bytes=1 << 24)
SHORT = Sampling(max_tokens=4, stop_tokens=())
FREE_ROWS = Costs(copy_s=0.01, copy_bytes_per_s=1e6, encode_tokens_per_s=100.0, step_s=0.01, row_s=0.0)
DEAR_ROWS = Costs(copy_s=0.01, copy_bytes_per_s=1e9, encode_tokens_per_s=100.0, step_s=0.01, row_s=0.01)
TRUNK = [7, 9, 11] * 50
LONG = Sampling(max_tokens=48, stop_tokens=())
"""The last is placed before the first has ended, on a busy machine, too."""


@pytest.mark.parametrize(("costs", "engines"), [(FREE_ROWS, 1), (DEAR_ROWS, 3)])
def test_branches_stay_together_or_spread_and_a_trunk_is_copied_once(
    tiny: LoadedModel, costs: Costs, engines: int
) -> None:
    events = EventList()
    router = load_loopback(tiny, 3, memory=MEMORY, costs=costs, sink=events)
    try:
        trunk = router.prefill(TRUNK)
        [first] = [event.engine for event in events.events if isinstance(event, RequestRouted)]
        events.events.clear()
        calls = [Decode([20 + number], [trunk], sampling=SHORT) for number in range(12)]
        said = router.decode(calls)
        placed = Counter(event.engine for event in events.events if isinstance(event, RequestRouted))
        copied = Counter(event.engine for event in events.events if isinstance(event, KVCopied))
        assert len(placed) == engines and max(placed.values()) <= 12 / engines + 2
        assert copied == Counter(dict.fromkeys(placed.keys() - {first}, 1)), "once to each of them"
        stats = router.stats()
        assert stats.tokens_recomputed == 0 and stats.tokens_encoded == 150 + 12 * 5
        assert len({tuple(router.tokens(each)) for each in said}) == 12
    finally:
        router.close()


WORKERS = 8


def team(planner: bool) -> ChoreoGraph:
    """Many workers over one question, which somebody has read before them, or nobody has."""
    graph, worker = ChoreoGraph(visibility="shared"), Worker("worker", sampling=LONG)

    def split(state: Mapping[str, Any]) -> list[Send]:
        return [worker.send(state, f"Part {number}.") for number in range(WORKERS)]

    graph.add_node(worker).add_edge("worker", END)
    if planner:
        graph.add_node(Agent("planner", sampling=SHORT)).add_edge(START, "planner")
    return graph.add_conditional_edges("planner" if planner else START, split, ["worker"])


@pytest.mark.parametrize("planner", [True, False], ids=["it was read before", "nobody has read it"])
def test_sends_spread_and_what_all_of_them_read_comes_to_each_engine_once(embedded: LoadedModel, planner: bool) -> None:
    events, question = EventList(), "What does Ann have? " * 12
    router = load_loopback(embedded, 3, memory=MEMORY, costs=DEAR_ROWS, sink=events)
    try:
        with router.scope():
            state = team(planner).compile(engine=router).invoke({"messages": [("user", question)]})
        workers = [entry for entry in state["handles"] if entry["author"] == "worker"]
        assert len(workers) == WORKERS
        placed = [event for event in events.events if isinstance(event, RequestRouted)]
        there = Counter(event.engine for event in placed[planner:])
        assert len(there) > 1, "they are placed one after the other, and some may have ended before others come"
        copied = Counter(event.engine for event in events.events if isinstance(event, KVCopied))
        stats, trunk = router.stats(), len(router.model.tokenizer.encode(question))
        if planner:
            assert copied == Counter(dict.fromkeys(there.keys() - {placed[0].engine}, 1)), "once to each of them"
            assert stats.tokens_recomputed == 0
        else:  # where it is nowhere yet, each engine reads it itself, once for all of its workers
            assert set(copied.values()) <= {1}
            alone = len(there) - 1 - len(copied)
            assert alone * trunk <= stats.tokens_recomputed <= alone * (trunk + 24)
    finally:
        router.close()
