"""LangGraph agents that hand each other KV-cache handles instead of strings."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # each under its own name: so a type checker takes it for public
    from choreo_agents.engine import Constraint as Constraint
    from choreo_agents.engine import Decode as Decode
    from choreo_agents.engine import Engine as Engine
    from choreo_agents.engine import EngineStats as EngineStats
    from choreo_agents.engine import Memory as Memory
    from choreo_agents.engine import Prefill as Prefill
    from choreo_agents.engine import Scheduling as Scheduling
    from choreo_agents.engine import StreamedToken as StreamedToken
    from choreo_agents.engine import Thinking as Thinking
    from choreo_agents.engine import Usage as Usage
    from choreo_agents.graph import END as END
    from choreo_agents.graph import START as START
    from choreo_agents.graph import Agent as Agent
    from choreo_agents.graph import AnswerSigner as AnswerSigner
    from choreo_agents.graph import AuditReport as AuditReport
    from choreo_agents.graph import ChoreoGraph as ChoreoGraph
    from choreo_agents.graph import ChoreoState as ChoreoState
    from choreo_agents.graph import Command as Command
    from choreo_agents.graph import HandleEntry as HandleEntry
    from choreo_agents.graph import HistoryLimit as HistoryLimit
    from choreo_agents.graph import Policy as Policy
    from choreo_agents.graph import RunOptions as RunOptions
    from choreo_agents.graph import Send as Send
    from choreo_agents.graph import Synthesizer as Synthesizer
    from choreo_agents.graph import VisibilityMode as VisibilityMode
    from choreo_agents.graph import VisibilityRule as VisibilityRule
    from choreo_agents.graph import Worker as Worker
    from choreo_agents.graph import send as send
    from choreo_agents.graph.comparing import acompare as acompare
    from choreo_agents.graph.comparing import compare as compare
    from choreo_agents.graph.replaying import afork as afork
    from choreo_agents.graph.replaying import areplay as areplay
    from choreo_agents.graph.replaying import fork as fork
    from choreo_agents.graph.replaying import replay as replay
    from choreo_agents.kv.handle import MessageHandle as MessageHandle
    from choreo_agents.models import PromptText as PromptText
    from choreo_agents.pml import Prompt as Prompt
    from choreo_agents.pml import PromptView as PromptView
    from choreo_agents.pml import Schema as Schema
    from choreo_agents.pml import SchemaLibrary as SchemaLibrary
    from choreo_agents.sampling import Grammar as Grammar
    from choreo_agents.sampling import Sampling as Sampling
    from choreo_agents.sampling import TokenConstraint as TokenConstraint

__version__ = "0.1.0"

_MODULES = {
    "engine": (
        "Decode",
        "Engine",
        "EngineStats",
        "Constraint",
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
        *(
            "HistoryLimit",
            "Policy",
            "VisibilityRule",
            "RunOptions",
            "Send",
            "Synthesizer",
            "VisibilityMode",
            "Worker",
            "send",
        ),
    ),
    "graph.comparing": ("acompare", "compare"),
    "graph.replaying": ("afork", "areplay", "fork", "replay"),
    "kv.handle": ("MessageHandle",),
    "models.prompt_text": ("PromptText",),
    "pml": ("Prompt", "PromptView", "Schema", "SchemaLibrary"),
    "sampling": ("Grammar", "Sampling", "TokenConstraint"),
}
_SUBPACKAGES = ("engine", "errors", "graph", "kv", "models", "pml", "sampling", "synthesis", "tracing", "workflows")
"""Subpackages that can be read as attributes without an import of their own."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name to be here
    __all__ = ["__version__"] + list(_MODULE_OF)  # noqa: RUF005 - no other sum is read as names

    def __getattr__(name: str) -> object:
        """Import a public name's module when the name is first read: torch and LangGraph take seconds."""
        if name in _SUBPACKAGES:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
