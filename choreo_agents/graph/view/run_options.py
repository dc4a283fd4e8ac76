"""What a program may ask of one run of a graph. Clients write `configurable` values too, and must not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig

from choreo_agents.arguments import refuses_unknown
from choreo_agents.errors import InvalidRequestError

Replay = Mapping[tuple[str, int, int, int], tuple[int, ...] | None]
"""Tokens by (author, superstep, branch, call): a run given one decodes just these, at the full price of each step;
freely where it has None."""

Watch = Callable[[str, int, int, int], Callable[[Any], None] | None]
"""For (author, superstep, branch, call), what is shown the logits before each of its tokens (see `Decode`)."""

_PLACE = "choreo"
_PLAIN = ("seed", "replay", "watch", "trace_confidential", "again")


@refuses_unknown()
@dataclass(frozen=True)
class RunOptions:
    """Options of one run, as `config["configurable"]["choreo"]`. JSON cannot carry it: no client of a service can.

    `app.invoke(given, {"configurable": {"choreo": RunOptions(seed=4)}})`
    """

    seed: int | None = None
    """From which the seeds of calls without one are derived; None: the engine's."""
    replay: Replay | None = None
    """Tokens to force."""
    watch: Watch | None = None
    """Who is shown the logits of each call."""
    trace_confidential: bool = False
    """Whether callbacks are shown what agents read in all its words, those included that are confidential."""
    again: bool = False
    """Whether agents are asked again though their thread knows what they have answered to the same view in the same
    place. The new answer takes the place of that. They draw as they drew before: another `seed` has them say something
    else."""

    def __post_init__(self) -> None:
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise InvalidRequestError(f"the seed of a run must be an integer, not {self.seed!r}")


def options_of(config: RunnableConfig) -> RunOptions:
    """The options of the run that a node's config is of.

    Raises:
        InvalidRequestError: They are given as plain values, which a client might have written.
    """
    configurable = config.get("configurable") or {}
    found = configurable.get(_PLACE, RunOptions())
    plain = [name for name in _PLAIN if name in configurable]
    if plain or not isinstance(found, RunOptions):
        given = {name: configurable[name] for name in plain} or {_PLACE: found}
        raise InvalidRequestError(
            f"configurable has {given!r}: options of a run are taken from one object only, which clients cannot write: "
            f'give {{"configurable": {{"{_PLACE}": choreo_agents.RunOptions(seed=..., replay=..., ...)}}}}'
        )
    return found
