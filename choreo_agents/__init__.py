"""LangGraph agents that hand each other KV-cache handles instead of strings."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from choreo_agents.engine import (
        Decode,
        Engine,
        EngineStats,
        Guided,
        Memory,
        Prefill,
        Scheduling,
        StreamedToken,
        Thinking,
        Usage,
    )
    from choreo_agents.graph import (
        END,
        START,
        Agent,
        AnswerSigner,
        AuditReport,
        ChoreoGraph,
        ChoreoState,
        Command,
        HandleEntry,
        Keep,
        Policy,
        Rule,
        RunOptions,
        Send,
        Synthesizer,
        VisibilityMode,
        Worker,
        send,
    )
    from choreo_agents.graph.comparing import acompare, compare
    from choreo_agents.graph.replaying import afork, areplay, fork, replay
    from choreo_agents.kv.handle import MessageHandle
    from choreo_agents.models import FramedText
    from choreo_agents.pml import Prompt, PromptView, Schema, SchemaLibrary
    from choreo_agents.sampling import Grammar, Sampling, TokenGuide

__version__ = "0.1.0"

__all__ = [
    "END",
    "START",
    "Agent",
    "AnswerSigner",
    "AuditReport",
    "ChoreoGraph",
    "ChoreoState",
    "Command",
    "Decode",
    "Engine",
    "EngineStats",
    "FramedText",
    "Grammar",
    "Guided",
    "HandleEntry",
    "Keep",
    "Memory",
    "MessageHandle",
    "Policy",
    "Prefill",
    "Prompt",
    "PromptView",
    "Rule",
    "RunOptions",
    "Sampling",
    "Scheduling",
    "Schema",
    "SchemaLibrary",
    "Send",
    "StreamedToken",
    "Synthesizer",
    "Thinking",
    "TokenGuide",
    "Usage",
    "VisibilityMode",
    "Worker",
    "__version__",
    "acompare",
    "afork",
    "areplay",
    "compare",
    "fork",
    "replay",
    "send",
]

_ROOMS = {
    "engine": (
        "Decode",
        "Engine",
        "EngineStats",
        "Guided",
        "Memory",
        "Prefill",
        "Scheduling",
        "StreamedToken",
        "Thinking",
        "Usage",
    ),
    "graph": (
        *(
            "END",
            "START",
            "Agent",
            "AnswerSigner",
            "AuditReport",
            "ChoreoGraph",
            "ChoreoState",
            "Command",
            "HandleEntry",
        ),
        *("Keep", "Policy", "Rule", "RunOptions", "Send", "Synthesizer", "VisibilityMode", "Worker", "send"),
    ),
    "graph.comparing": ("acompare", "compare"),
    "graph.replaying": ("afork", "areplay", "fork", "replay"),
    "kv.handle": ("MessageHandle",),
    "models.framed": ("FramedText",),
    "pml": ("Prompt", "PromptView", "Schema", "SchemaLibrary"),
    "sampling": ("Grammar", "Sampling", "TokenGuide"),
}
_SUBPACKAGES = ("engine", "errors", "graph", "kv", "models", "pml", "sampling", "synthesis", "tracing", "workflows")
"""What can be had as an attribute without an import of its own."""
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name to be here

    def __getattr__(name: str) -> object:
        """Import a public name's room when the name is first asked for: torch and LangGraph take seconds."""
        if name in _SUBPACKAGES:
            return import_module(f"{__name__}.{name}")
        if name not in _ROOM_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
