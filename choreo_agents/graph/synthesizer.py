"""A node that merges parallel branches: from their caches, or from their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from choreo_agents.engine.branches import SHORTER
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.view.merged_branches import MergeSpec
from choreo_agents.graph.visibility import REENCODED, SHARED, Mode, Positions, Rule, rules_of
from choreo_agents.synthesis.strategies import Strategy, require_strategy


class Synthesizer(Agent):
    """An agent that reads branches in a stated order and says one message about all of them (Parallel-Synthesis).

    `sequential`, `parallel` and `summary` read the branches' own encodings, so that nothing of theirs is encoded again;
    `text` is what a graph of strings does. Branches of one source stand in the order of their sends.

    Args:
        name: As for `Agent`.
        merges: The nodes whose messages it merges, in the order in which it sees those of one superstep; a mapping
            gives a source another rule than the strategy's.
        strategy: How (see `Strategy`).
        summary: What each branch's speaker is asked under `summary`, to say it shorter.
        **options: As for `Agent`; `reads` are further sources. The cache mapper of its `adapter`, if it has one, maps
            the branches: each once, however often it is merged.
    """

    def __init__(
        self,
        name: str,
        *,
        merges: Sequence[str] | Mapping[str, Mode | Rule],
        strategy: Strategy = "sequential",
        summary: str = SHORTER,
        **options: Any,
    ) -> None:
        require_strategy(strategy)
        if isinstance(merges, str) or not merges:
            raise InvalidRequestError(f"merges must name the nodes whose messages are merged, not {merges!r}")
        mode: Mode = REENCODED if strategy == "text" else SHARED
        sources = merges if isinstance(merges, Mapping) else dict.fromkeys(merges, mode)
        positions: Positions = "parallel" if strategy == "parallel" else "sequential"
        if options.get("positions") not in (None, positions):
            raise InvalidRequestError(
                f"strategy {strategy!r} places its branches itself: leave positions={options['positions']!r} out"
            )
        reads = {**sources, **rules_of(options.pop("reads", {}))}
        super().__init__(name, reads=reads, **{**options, "positions": positions})
        self.strategy: Strategy = strategy
        self.merging = MergeSpec(frozenset(sources), strategy != "text", summary if strategy == "summary" else None)
