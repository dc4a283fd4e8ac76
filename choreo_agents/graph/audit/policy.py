"""A graph's promises about its private contexts, and what happens if a path would break one."""

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
    """The personas that each private context may influence, and the channels through which it must reach nobody else.

    Without a policy a graph promises only what it declares `private`; the audit reports everything else.
    """

    confidential: dict[str, frozenset[str]] = Field(default_factory=dict)
    """For each private context (`alice.system`, a node with confidential messages, a confidential module:
    `travel/plan`), the personas that it may reach. A node without a persona goes by its own name. Owners always have
    their contexts."""
    channels: frozenset[Channel] = frozenset({"encoding"})
    """The channels by which they may reach nobody else. Forbidding `words` forbids encodings, too, since these carry
    the text."""
    on_violation: OnViolation = "raise"
    """`raise`: the graph does not compile, or the call fails. `reencode`: the edge that would break a promise hands on
    text instead of KV. `warn`: a `VisibilityWarning` is issued."""

    @field_validator("channels")
    @classmethod
    def _include_encoding(cls, channels: frozenset[Channel]) -> frozenset[Channel]:
        return channels | {"encoding"} if "words" in channels else channels

    @model_validator(mode="after")
    def _require_possible(self) -> Self:
        if self.on_violation == "reencode" and "words" in self.channels:
            raise ValueError("the policy cannot re-encode for the words channel: use on_violation='raise'")
        return self

    def forbids(self, context: PrivateContext, persona: str, channel: Channel) -> bool:
        """Return whether a context must not reach a persona that does not own it, through this channel."""
        allowed = self.confidential.get(context.name)
        return allowed is not None and channel in self.channels and persona not in allowed

    def within(self, prefix: str, modules: Collection[str] = ()) -> Policy:
        """Return the policy for a graph inside another: all names get the prefix, except those of modules."""
        named = {
            (context if context in modules else prefix + context): frozenset(prefix + persona for persona in allowed)
            for context, allowed in self.confidential.items()
        }
        return self.model_copy(update={"confidential": named})

    def require_names(self, contexts: Iterable[str], personas: Iterable[str]) -> None:
        """Raise `VisibilityError` if the policy names no context or no persona of the graph."""
        known_contexts, known_personas = set(contexts), set(personas)
        for context, allowed in self.confidential.items():
            if context not in known_contexts:
                names = ", ".join(sorted(known_contexts)) or "none"
                raise VisibilityError(f"{context!r} of the policy is not a private context. The graph has: {names}")
            for reader in sorted(allowed - known_personas):
                raise VisibilityError(
                    f"the policy lets {context!r} reach {reader!r}, which is not a persona of the graph: "
                    f"{', '.join(sorted(known_personas))}"
                )
