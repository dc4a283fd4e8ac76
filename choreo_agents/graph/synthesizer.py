"""`Synthesizer`: an agent that merges parallel branches, from their KV or from their text."""

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
    """An agent that reads branches in a given order and writes one message about all of them (Parallel-Synthesis).

    `sequential`, `parallel` and `summary` read the branches' own encodings, so that none is encoded again; `text` does
    what a graph of strings does. Branches of one source stand in the order of their sends.

    Args:
        name: As for `Agent`.
        merges: The nodes whose messages it merges, in the order in which those of one superstep are shown; a mapping
            gives a source another rule than the strategy's.
        strategy: How branches are placed and read (see `Strategy`).
        summary: Under `summary`, the prompt by which each branch's author makes its message shorter.
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
            raise InvalidRequestError(f"merges must be the names of nodes whose messages are merged, not {merges!r}")
        sources = merges if isinstance(merges, Mapping) else dict.fromkeys(merges, mode_of_strategy(strategy))
        positions = _positions(strategy)
        if options.get("positions") not in (None, positions):
            raise InvalidRequestError(
                f"strategy {strategy!r} sets the positions itself: leave positions={options['positions']!r} out"
            )
        reads = {**sources, **rules_of(options.pop("reads", {}))}
        super().__init__(name, reads=reads, **{**options, "positions": positions})
        self._shorter, self.strategy = summary, strategy
        self.merging: MergeSpec = self._merging(strategy, sources)

    def _merging(self, strategy: Strategy, sources: Iterable[str]) -> MergeSpec:
        return MergeSpec(frozenset(sources), strategy != "text", self._shorter if strategy == "summary" else None)

    def merging_by(self, strategy: Strategy) -> Synthesizer:
        """Return a copy that merges by another strategy; the rules for its sources are left to its graph."""
        changed = copy.copy(self)
        changed.strategy, changed.positions = strategy, _positions(strategy)
        changed.merging = self._merging(strategy, self.merging.sources)
        return changed


def mode_of_strategy(strategy: Strategy) -> VisibilityMode:
    """Return the visibility mode of the branches under a strategy; raise `InvalidRequestError` if there is no such
    strategy."""
    require_strategy(strategy)
    return REENCODED if strategy == "text" else SHARED


def _positions(strategy: Strategy) -> Positions:
    return "parallel" if strategy == "parallel" else "sequential"
