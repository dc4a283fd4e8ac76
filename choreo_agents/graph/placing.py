"""Positions of a view's messages, one after the other or siblings at one offset."""

from __future__ import annotations

from dataclasses import dataclass, field

from choreo_agents.kv.handle import MessageHandle


@dataclass
class PlacedView:
    """Messages in the order in which they are attended to, each with its offset."""

    handles: list[MessageHandle] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0
    """The first position that nothing reaches: where what follows starts."""

    def add(self, handle: MessageHandle, offset: int | None = None) -> None:
        """Append a message, by default at the end."""
        at = self.end if offset is None else offset
        self.handles.append(handle)
        self.offsets.append(at)
        self.end = max(self.end, at + handle.length)

    def copy(self) -> PlacedView:
        return PlacedView(list(self.handles), list(self.offsets), self.end)
