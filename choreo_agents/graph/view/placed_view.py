"""Positions of a view's messages, one after the other or siblings at one offset."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from choreo_agents.kv.handle import MessageHandle

Turn = Literal["closed", "begun", "open"]
"""Of a user at the end of a view: none, or it is over; nothing is said in it yet that something must stand behind; or
there is."""


@dataclass
class PlacedView:
    """Messages in the order in which they are attended to, each with its offset."""

    handles: list[MessageHandle] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0
    """The first position that nothing reaches: where what follows starts."""
    ends: dict[str, int] = field(default_factory=dict)
    """Where each message ends, by its id and that of the message that it stands for."""
    turn: Turn = "closed"
    """Whether others can go on speaking in a user's turn (see `UserTurns`)."""
    joints: set[str] = field(default_factory=set)
    """The ids of what stands around the parts of users' turns."""

    def add(self, handle: MessageHandle, offset: int | None = None, stands_for: MessageHandle | None = None) -> None:
        """Append a message, by default at the end."""
        at = self.end if offset is None else offset
        self.ends |= {each.id: at + handle.length for each in (handle, stands_for or handle)}
        self._place(handle, at)

    def add_joint(self, handle: MessageHandle) -> None:
        """Append what is no message: nobody has said it, and it may stand in many places."""
        self.joints.add(handle.id)
        self._place(handle, self.end)

    def add_beside(self, handle: MessageHandle, offset: int) -> None:
        """Append a message that nothing moves for: what follows starts where it would have started."""
        self.handles.append(handle)
        self.offsets.append(offset)

    def extend(self, other: PlacedView, first: int) -> None:
        """Append what another view holds from a place on, where it stands there."""
        for handle, offset in zip(other.handles[first:], other.offsets[first:], strict=True):
            self._place(handle, offset)
        self.ends |= other.ends
        self.joints |= other.joints
        self.turn = other.turn

    def close(self, since: int) -> None:
        """Say that a user's turn is over, and that what closed it since then belongs to the last message in it."""
        self.ends |= {each: self.end for each, end in self.ends.items() if end == since}
        self.turn = "closed"

    def resume_at(self, position: int) -> None:
        """Let what follows start there."""
        self.end = position

    def behind(self, ids: Collection[str]) -> int:
        """Where the last of some messages ends; where all end, if none of them is in view."""
        return max((end for each, end in self.ends.items() if each in ids), default=self.end)

    def copy(self) -> PlacedView:
        return PlacedView(
            list(self.handles), list(self.offsets), self.end, dict(self.ends), self.turn, set(self.joints)
        )

    def _place(self, handle: MessageHandle, at: int) -> None:
        self.handles.append(handle)
        self.offsets.append(at)
        self.end = max(self.end, at + handle.length)
