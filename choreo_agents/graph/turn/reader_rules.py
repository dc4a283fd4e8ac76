"""All that a graph tells one of its agents about what it may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from choreo_agents.graph.audit.guard import Guard
from choreo_agents.graph.visibility import Positions, Rule


@dataclass(frozen=True)
class ReaderRules:
    """How one reader's views are made."""

    sources: Mapping[str, Rule]
    """By name, in the order in which it sees those of one superstep."""
    public: str | None = None
    """The system prompt that all views start with."""
    positions: Positions = "sequential"
    systems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """System prompts that fresh encodings may attend to, by the name of the private context."""
    confidential: frozenset[str] = frozenset()
    """The nodes whose messages are private contexts."""
    guard: Guard = field(default_factory=Guard)
    by_tenant: bool = False
    """Whether each run is served for the tenant that it is for, and not for whom the engine was loaded."""
