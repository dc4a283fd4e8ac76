"""The engine: prefill, decode and release of messages, also by the baseline methods that encode text again."""

from choreo_agents.engine.calls import Constraint, Decode, PlayedCall, Prefill, StreamedToken, Thinking
from choreo_agents.engine.engine import Engine, twin_of
from choreo_agents.engine.introspection import EngineStats
from choreo_agents.engine.messages.message import Scope, Usage
from choreo_agents.engine.messages.thread_leases import EphemeralRun
from choreo_agents.engine.settings import Memory, Scheduling

__all__ = [
    "Constraint",
    "Decode",
    "Engine",
    "EngineStats",
    "EphemeralRun",
    "Memory",
    "PlayedCall",
    "Prefill",
    "Scheduling",
    "Scope",
    "StreamedToken",
    "Thinking",
    "Usage",
    "twin_of",
]
