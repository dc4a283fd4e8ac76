"""One run of a graph on an engine: how it ended, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.engine import Engine
from choreo_agents.graph import ChoreoGraph
from choreo_agents.graph.langgraph_internals import branch_of, superstep_of
from choreo_agents.graph.view.run_place import Replay, RunOptions
from choreo_agents.kv.handle import MessageHandle

Place = tuple[int, int]
"""Of a message in a run: its step, and which of the branches that one node sent there side by side."""
OnToken = Callable[[str, str, str, Place], None]
"""Called with agent, message id, text and the message's place for every piece of text as it is decoded."""
MOST_STEPS = 1000
"""Supersteps of a run."""
OnDecode = Callable[[Mapping[str, Any]], None]
"""Called with what `stream_mode="custom"` tells of a message that was said: agent, tokens encoded and reused, times."""


@dataclass(frozen=True)
class RunCost:
    """What one run cost; counts are meant for a run that has the engine to itself."""

    ttft_s: tuple[float, ...]
    """Of every decode: seconds from its node's start to its first token, encoding of what it reads included."""
    end_to_end_s: float
    """From the graph's start to its end."""
    tokens_encoded: int
    """For the first time, or again since memory had lost them."""
    tokens_reused: int
    rows_per_decode_step: float

    @property
    def ttft_mean_s(self) -> float:
        return mean(self.ttft_s)


async def run_graph(
    engine: Engine,
    graph: ChoreoGraph,
    messages: Sequence[Any],
    *,
    replay: Replay | None = None,
    seed: int | None = None,
    on_token: OnToken | None = None,
    on_decode: OnDecode = lambda item: None,
) -> tuple[Mapping[str, Any], RunCost]:
    """Run a graph once and return its end state and its cost.

    Args:
        engine: Serves it.
        graph: Compiled here, before the clock starts.
        messages: Its input.
        replay: The tokens that every agent must say.
        seed: Of the run.
        on_token: Sees the words as they come.
        on_decode: Sees what each message cost.
    """
    app = graph.compile(engine=engine)
    config: Any = {"configurable": {"choreo": RunOptions(seed, replay)}, "recursion_limit": MOST_STEPS}
    before = engine.stats()
    state: Mapping[str, Any] = {}
    waits: list[float] = []
    modes: list[Any] = ["custom", "values", *(["messages"] if on_token is not None else [])]
    started = time.perf_counter()
    async for mode, item in app.astream({"messages": list(messages)}, config, stream_mode=modes):
        if mode == "values":
            state = item
        elif mode == "custom":
            waits.append(item["ttft_s"])
            on_decode(item)
        elif on_token is not None:
            message, metadata = item
            where = RunnableConfig(metadata=metadata)
            place = superstep_of(where), branch_of(where)
            on_token(metadata["langgraph_node"], message.id, message.text, place)
    elapsed = time.perf_counter() - started
    after = engine.stats()

    def spent(name: str) -> int:
        return int(getattr(after, name) - getattr(before, name))

    cost = RunCost(
        ttft_s=tuple(waits),
        end_to_end_s=elapsed,
        tokens_encoded=spent("tokens_encoded") + spent("tokens_recomputed"),
        tokens_reused=spent("tokens_reused"),
        rows_per_decode_step=spent("decode_rows") / max(1, spent("decode_steps")),
    )
    return state, cost


def sampled(engine: Engine, state: Mapping[str, Any]) -> Replay:
    """The tokens that every agent has sampled in a finished run: to be forced on another."""
    said: dict[tuple[str, int, int, int], tuple[int, ...]] = {}
    for entry in state["handles"]:
        # What was thought before it was said is sampled as well.
        handle = MessageHandle.model_validate(entry.get("thoughts") or entry["handle"])
        [*_, made] = engine.inspect.records([handle])
        if made.sampled is not None:
            place = (entry["author"], entry["superstep"], entry["branch"], entry["call"])
            said[place] = made.tokens[slice(*made.sampled)]
    return said
