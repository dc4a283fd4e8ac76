"""Other ways to place calls than the product's own, to compare it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from choreo_agents.engine.elsewhere.routing import CallToPlace, Costs, EngineAhead, Route, Routing, route


def no_home(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """As it is, but that no call has a home."""
    return route(replace(call, home=None), engines, costs)


def stays(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """A thread never leaves the engine that its first call was given."""
    home = [engine for engine in engines if engine.name == call.home]
    return route(call, home or engines, costs)


def least_loaded(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """The engine with the least to do, whatever it has."""
    return route(call, [min(engines, key=lambda engine: (engine.tokens, engine.rows, engine.name))], costs)


def most_held(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """The engine that has most of what the call reads, whatever it has to do."""

    def held(engine: EngineAhead) -> int:
        return sum(read.nbytes for read in call.reads if engine.name in read.holders)

    return route(
        call, [min(engines, key=lambda engine: (-held(engine), engine.tokens, engine.rows, engine.name))], costs
    )


def no_copies(call: CallToPlace, engines: Sequence[EngineAhead], costs: Costs) -> Route:
    """As it is, but that what an engine lacks is always encoded again."""
    return route(call, [replace(engine, room_bytes=0) for engine in engines], costs)


RULES: Mapping[str, Routing] = {
    "route": route,
    "no-home": no_home,
    "stays": stays,
    "least-loaded": least_loaded,
    "most-held": most_held,
    "no-copies": no_copies,
}
"""By the names that commands have for them; the first is the product's own."""
