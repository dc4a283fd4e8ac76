"""LangGraph agents that hand each other KV-cache handles instead of strings."""

from choreo_agents.engine import Decode, Engine, EngineStats, Joining, Prefill, StreamedToken, Usage
from choreo_agents.graph import (
    END,
    START,
    Agent,
    AuditReport,
    ChoreoGraph,
    ChoreoState,
    Command,
    HandleEntry,
    Policy,
    Rule,
    Send,
    Synthesizer,
    Worker,
    send,
)
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml import Prompt, PromptView, Schema, SchemaLibrary
from choreo_agents.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "END",
    "START",
    "Agent",
    "AuditReport",
    "ChoreoGraph",
    "ChoreoState",
    "Command",
    "Decode",
    "Engine",
    "EngineStats",
    "HandleEntry",
    "Joining",
    "MessageHandle",
    "Policy",
    "Prefill",
    "Prompt",
    "PromptView",
    "Rule",
    "Sampling",
    "Schema",
    "SchemaLibrary",
    "Send",
    "StreamedToken",
    "Synthesizer",
    "Usage",
    "Worker",
    "__version__",
    "send",
]
