"""A node that merges parallel branches: from their caches, or from their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.visibility import Mode, Positions, Rule

Strategy = Literal["sequential", "parallel", "text"]
"""How branches are merged: their encodings one after the other; side by side at one offset; or their words, encoded
anew after each other."""


class Synthesizer(Agent):
    """An agent that reads branches in a stated order and says one message about all of them (Parallel-Synthesis).

    `sequential` and `parallel` read the branches' own encodings, so that nothing of theirs is encoded again; `text`
    is what a graph of strings does. Branches of one source stand in the order of their sends.

    Args:
        name: As for `Agent`.
        merges: The nodes whose messages it merges, in the order in which it sees those of one superstep; a mapping
            gives a source another rule than the strategy's.
        strategy: How.
        **options: As for `Agent`; `reads` are further sources.
    """

    def __init__(
        self,
        name: str,
        *,
        merges: Sequence[str] | Mapping[str, Mode | Rule],
        strategy: Strategy = "sequential",
        **options: Any,
    ) -> None:
        if strategy not in get_args(Strategy):
            raise InvalidRequestError(f"strategy must be one of {', '.join(get_args(Strategy))}, not {strategy!r}")
        if isinstance(merges, str) or not merges:
            raise InvalidRequestError(f"merges must name the nodes whose messages are merged, not {merges!r}")
        mode: Mode = "reencoded" if strategy == "text" else "shared"
        sources = merges if isinstance(merges, Mapping) else dict.fromkeys(merges, mode)
        positions: Positions = "parallel" if strategy == "parallel" else "sequential"
        reads = {**sources, **options.pop("reads", {})}
        super().__init__(name, reads=reads, **{"positions": positions, **options})
        self.strategy: Strategy = strategy
