"""Recorded runs, played again or gone on with otherwise."""

from choreo_agents.graph.replaying.comparing import Expect, areplay, replay
from choreo_agents.graph.replaying.forking import afork, fork
from choreo_agents.graph.replaying.reports import ForkedCall, ForkReport, ReplayedCall, ReplayReport, RouteChange

__all__ = [
    "Expect",
    "ForkReport",
    "ForkedCall",
    "ReplayReport",
    "ReplayedCall",
    "RouteChange",
    "afork",
    "areplay",
    "fork",
    "replay",
]
