"""What a graph promises about its private contexts, and what happens if a path would break it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from choreo_agents.arguments import Options
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.audit.report import PrivateContext
from choreo_agents.graph.visibility import Channel

OnViolation = Literal["raise", "reencode", "warn"]


class Policy(Options):
    """Who may be influenced by which private context, and through which channel.

    Without one a graph promises what it declares `private`, and the audit reports the rest.
    """

    confidential: dict[str, frozenset[str]] = Field(default_factory=dict)
    """Private contexts (`alice.system`, a node whose messages are confidential, a confidential module: `travel/plan`),
    and the personas that they may reach: nodes that are nobody else's go by their own name. Their owners always have
    them."""
    channels: frozenset[Channel] = frozenset({"encoding"})
    """Through which they may reach nobody else. An encoding carries the words that it is of: who forbids these, forbids
    both."""
    on_violation: OnViolation = "raise"
    """`raise`: the graph does not compile, or the call fails. `reencode`: the edge that would break a promise hands on
    words instead. `warn`: a `VisibilityWarning`, and nothing else."""

    @field_validator("channels")
    @classmethod
    def _with_what_carries_them(cls, channels: frozenset[Channel]) -> frozenset[Channel]:
        return channels | {"encoding"} if "words" in channels else channels

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.on_violation == "reencode" and "words" in self.channels:
            raise ValueError("words cannot be cut by re-encoding them: use on_violation='raise' for the words channel")
        return self

    def forbids(self, context: PrivateContext, persona: str, channel: Channel) -> bool:
        """Whether a context must not reach a persona, to which it does not belong, through a channel."""
        allowed = self.confidential.get(context.name)
        return allowed is not None and channel in self.channels and persona not in allowed

    def within(self, prefix: str, modules: Collection[str] = ()) -> Policy:
        """The policy of a graph that stands in another: all names behind those of its nodes, but not its modules'."""
        named = {
            (context if context in modules else prefix + context): frozenset(prefix + each for each in allowed)
            for context, allowed in self.confidential.items()
        }
        return self.model_copy(update={"confidential": named})

    def require_names(self, contexts: Iterable[str], personas: Iterable[str]) -> None:
        """Raise `VisibilityError` if the policy names no context or no persona of the graph."""
        known, there = set(contexts), set(personas)
        for context, allowed in self.confidential.items():
            if context not in known:
                names = ", ".join(sorted(known)) or "none"
                raise VisibilityError(f"the policy names no private context: {context!r}. The graph has: {names}")
            for reader in sorted(allowed - there):
                raise VisibilityError(
                    f"the policy lets {context!r} reach {reader!r}, which is no persona of the graph: "
                    f"{', '.join(sorted(there))}"
                )
