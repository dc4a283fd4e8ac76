"""Recorded runs, made again over their answers, or gone on with otherwise."""

from choreo_agents.graph.replaying.replaying import afork, areplay, fork, recorded_engine, replay
from choreo_agents.graph.replaying.reports import ReplayedCall, ReplayReport

__all__ = ["ReplayReport", "ReplayedCall", "afork", "areplay", "fork", "recorded_engine", "replay"]
