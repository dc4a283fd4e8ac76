"""The engine: prefill, decode, release, and the twins that re-encode text."""

from choreo_agents.engine.calls import Decode, Guided, PlayedCall, Prefill, StreamedToken, Thinking
from choreo_agents.engine.engine import Engine, twin_of
from choreo_agents.engine.messages.holdings import UnkeptRun
from choreo_agents.engine.messages.message import Usage
from choreo_agents.engine.settings import Memory, Scheduling
from choreo_agents.engine.stock import EngineStats

__all__ = [
    "Decode",
    "Engine",
    "EngineStats",
    "Guided",
    "Memory",
    "PlayedCall",
    "Prefill",
    "Scheduling",
    "StreamedToken",
    "Thinking",
    "UnkeptRun",
    "Usage",
    "twin_of",
]
