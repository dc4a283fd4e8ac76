"""A node that merges parallel branches: from their caches, or from their words."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from choreo_agents.engine import Engine
from choreo_agents.engine.branches import SHORTER
from choreo_agents.errors import InvalidRequestError
from choreo_agents.graph.agent import Agent, serving
from choreo_agents.graph.provenance.updates import rewritten
from choreo_agents.graph.quorum.gathering import Gathering, QuorumPlan, state_before, with_branches
from choreo_agents.graph.quorum.late_branches import LateBranches
from choreo_agents.graph.turn.turn import AgentTurn, Speaker
from choreo_agents.graph.turn.updating import with_update
from choreo_agents.graph.view.merged_branches import MergeSpec
from choreo_agents.graph.visibility import REENCODED, SHARED, Mode, Positions, Rule, rules_of
from choreo_agents.graph.words.thoughts import longest_frame
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
        quorum: Start as soon as so many branches are in; the others come into its view while it speaks, between two of
            its tokens. None: wait for all. In a `ChoreoGraph` only; not with `text` and `summary`.
        deadline_s: Seconds since the branches were started after which one is enough.

    Under `parallel` a late branch stands where the others do, or, if it is longer than the room that they take, so that
    it ends where the synthesizer's own turn begins. Under `sequential` room is left for those that are out, as much as
    their `max_tokens` need and the context has: they stand there one behind the other, as they come. Methods that keep
    text only leave late branches out. Their messages are in the final state in any case; the synthesizer's own says
    which it saw, and from which of its tokens on, in `response_metadata["choreo"]["branches"]`.
    """

    def __init__(
        self,
        name: str,
        *,
        merges: Sequence[str] | Mapping[str, Mode | Rule],
        strategy: Strategy = "sequential",
        summary: str = SHORTER,
        quorum: int | None = None,
        deadline_s: float | None = None,
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
        self.quorum = _required_quorum(quorum, deadline_s, strategy)
        self.deadline_s = deadline_s
        self._plan: QuorumPlan | None = None
        """How its graph keeps its quorum; None: in no compiled graph, or without one."""
        self.merging = MergeSpec(frozenset(sources), summary if strategy == "summary" else None)

    def gathering(self, plan: QuorumPlan) -> Self:
        """A copy that starts when a quorum of its branches is in, as its graph has planned."""
        synthesizer = copy.copy(self)
        synthesizer._plan = plan
        return synthesizer

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> dict[str, Any]:
        """Speak once, when enough branches are in. Takes graph state, returns its update."""
        plan = self._plan
        if self.quorum is None or self.engine is None:
            return await super().ainvoke(input, config, **options)
        if plan is None:
            raise InvalidRequestError(
                f"{self.name!r} has a quorum, which only a ChoreoGraph can keep: add it to one, or leave quorum out"
            )
        config = ensure_config(config)
        agent, engine = serving(self, config)
        _require_room_to_wait(self.name, config, plan)
        update: dict[str, Any] = await _early(agent, engine, self.quorum, plan, input, config)
        return update


async def _early(
    agent: Synthesizer, engine: Engine, quorum: int, plan: QuorumPlan, given: Any, config: RunnableConfig
) -> Any:
    """Speak when a quorum of branches is in, once for all that are started with them. Returns the state's update."""
    gathering = Gathering(agent.name, frozenset(plan.merged), given, config)
    with gathering.entered() as first:
        if not first:
            return {}
        branches = await gathering.enough(quorum, agent.deadline_s)
        state = with_branches(state_before(config, plan.schema, plan.channels), branches)
        longest = max(
            _longest(agent.persona or agent.name, engine, *each, gathering.speakers) for each in plan.merged.items()
        )
        late = LateBranches(gathering, branches, longest, keeps_kv=engine.method == "choreo")
        said = await AgentTurn(agent, engine, state, config, late).speak(lambda: gathering.next_superstep)
        # What it has seen comes with it: a route behind it runs before its superstep ends, and sees this only.
        seen = [branch.update for branch in gathering.taken()]
        channels = ("handles", "messages")
        before = {name: [each for update in seen for each in update.get(name) or []] for name in channels}
        written = await with_update(agent, said, state, config)
        return rewritten(written, {name: partial(_behind, many) for name, many in before.items()})


def _behind(before: Sequence[Any], written: Any) -> Any:
    """What is written to a channel behind what branches wrote, unless it overwrites all of that."""
    return [*before, *written] if isinstance(written, list) else written


def _longest(home: str, engine: Engine, node: str, agent: Speaker, speakers: frozenset[str]) -> int:
    """Tokens of the longest messages that an agent can say at a time, as far as that is known before it speaks.

    With what it is asked, if that stands in the view, too, and is fixed.
    """
    encode, own = engine.model.encode, (agent.persona or node) == home
    asked = encode(engine.chat.turn("user", agent.prompt)) if own and isinstance(agent.prompt, str) else ()
    frame = longest_frame(agent, engine, [agent.speaker({}), *speakers], own=own)
    return agent.n * (len(asked) + frame + agent.sampling.longest)


def _require_room_to_wait(name: str, config: RunnableConfig, plan: QuorumPlan) -> None:
    """Raise if branches cannot run while a synthesizer waits for them."""
    most = config.get("max_concurrency")
    if most is not None and most <= plan.waiting:
        raise InvalidRequestError(
            f"max_concurrency={most} lets {name!r} wait for branches that cannot run meanwhile: raise it to "
            f"{plan.waiting + 1} at least, or leave the quorum out"
        )


def _required_quorum(quorum: int | None, deadline_s: float | None, strategy: Strategy) -> int | None:
    """A quorum that can be kept."""
    if quorum is None:
        if deadline_s is not None:
            raise InvalidRequestError("deadline_s says when fewer branches than a quorum are enough: give quorum=, too")
        return None
    if isinstance(quorum, bool) or not isinstance(quorum, int) or quorum < 1:
        raise InvalidRequestError(f"quorum must be a number of branches from 1 on, not {quorum!r}")
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and deadline_s >= 0):
        raise InvalidRequestError(f"deadline_s must be a number of seconds, not {deadline_s!r}")
    if strategy in ("text", "summary"):
        raise InvalidRequestError(
            f"strategy {strategy!r} waits for all branches: their words are encoded one after the other first. Use "
            "'parallel' or 'sequential' with a quorum"
        )
    return quorum
