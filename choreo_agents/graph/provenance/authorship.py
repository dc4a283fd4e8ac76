"""In whose name a plain node may write: its own, that of agents that spoke inside of it, or one that is declared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Authorship:
    """Of one plain node."""

    node: str
    """Its path."""
    persona: str | None
    """Whose node it is declared to be, behind the subgraphs; None: its own."""

    def covers(self, author: str, persona: str | None) -> bool:
        """Whether a message may be this author's, who is of this persona."""
        if self.persona is not None and self.persona in (author, persona):
            return True
        return self._is_inside(author) and (persona is None or self._is_inside(persona))

    def _is_inside(self, name: str) -> bool:
        return name == self.node or name.startswith(f"{self.node}|")
