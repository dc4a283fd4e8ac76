"""A node that merges parallel branches: from their caches, or from their words."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine.branches import SHORTER
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent
from choreo_agents.graph.view.reader_rules import MergeSpec
from choreo_agents.graph.visibility import REENCODED, SHARED, Mode, Positions, VisibilityMode, VisibilityRule, rules_of
from choreo_agents.synthesis.placing import Strategy, require_strategy


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

    @refuses_unknown(Agent)
    def __init__(
        self,
        name: str,
        *,
        merges: Sequence[str] | Mapping[str, Mode | VisibilityRule],
        strategy: Strategy = "sequential",
        summary: str = SHORTER,
        **options: Any,
    ) -> None:
        if isinstance(merges, str) or not merges:
            raise InvalidRequestError(f"merges must name the nodes whose messages are merged, not {merges!r}")
        sources = merges if isinstance(merges, Mapping) else dict.fromkeys(merges, mode_of_strategy(strategy))
        positions = _positions(strategy)
        if options.get("positions") not in (None, positions):
            raise InvalidRequestError(
                f"strategy {strategy!r} places its branches itself: leave positions={options['positions']!r} out"
            )
        reads = {**sources, **rules_of(options.pop("reads", {}))}
        super().__init__(name, reads=reads, **{**options, "positions": positions})
        self._shorter, self.strategy = summary, strategy
        self.merging: MergeSpec = self._merging(strategy, sources)

    def _merging(self, strategy: Strategy, sources: Iterable[str]) -> MergeSpec:
        return MergeSpec(frozenset(sources), strategy != "text", self._shorter if strategy == "summary" else None)

    def merging_by(self, strategy: Strategy) -> Synthesizer:
        """Return a copy that merges by another strategy; its graph says how it reads its sources."""
        changed = copy.copy(self)
        changed.strategy, changed.positions = strategy, _positions(strategy)
        changed.merging = self._merging(strategy, self.merging.sources)
        return changed


def mode_of_strategy(strategy: Strategy) -> VisibilityMode:
    """Return how branches are read that are merged so; raises `InvalidRequestError` if there is no such strategy."""
    require_strategy(strategy)
    return REENCODED if strategy == "text" else SHARED


def _positions(strategy: Strategy) -> Positions:
    return "parallel" if strategy == "parallel" else "sequential"
