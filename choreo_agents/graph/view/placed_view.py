"""Positions of a view's messages, one after the other or siblings at one offset; and what stands around what others
say, where a chat template lets users and model take turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from choreo_agents.engine import Prefill
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import Kind, PromptText, TurnText

_PUBLIC_ROOT = "public root"
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
    """Whether others can go on speaking in a user's turn (see `TurnMerger`)."""
    separators: set[str] = field(default_factory=set)
    """The ids of what stands around the parts of users' turns."""

    def add(self, handle: MessageHandle, offset: int | None = None, stands_for: MessageHandle | None = None) -> None:
        """Append a message, by default at the end."""
        at = self.end if offset is None else offset
        self.ends |= {each.id: at + handle.length for each in (handle, stands_for or handle)}
        self._place(handle, at)

    def add_separator(self, handle: MessageHandle) -> None:
        """Append what is no message: nobody has said it, and it may stand in many places."""
        self.separators.add(handle.id)
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
        self.separators |= other.separators
        self.turn = other.turn

    def close(self, since: int) -> None:
        """Say that a user's turn is over, and that what closed it since then belongs to the last message in it."""
        self.ends |= {each: self.end for each, end in self.ends.items() if end == since}
        self.turn = "closed"

    def behind(self, ids: Collection[str]) -> int:
        """Where the last of some messages ends; where all end, if none of them is in view."""
        return max((end for each, end in self.ends.items() if each in ids), default=self.end)

    def copy(self) -> PlacedView:
        return PlacedView(
            list(self.handles), list(self.offsets), self.end, dict(self.ends), self.turn, set(self.separators)
        )

    def _place(self, handle: MessageHandle, at: int) -> None:
        self.add_beside(handle, at)
        self.end = max(self.end, at + handle.length)


class TurnMerger:
    """Puts all that others say between two of the model's turns into one user's turn.

        root | open | question | between | bob: ... | close | the reader's own turn | open | question | close | header

    Messages are parts, which anybody can see anywhere. What opens a user's turn, stands between two parts and closes it
    (the joints) are spans of a few tokens, which each view has where it needs them; each is encoded once, behind the
    root, and says nothing of anybody. Where turns may follow each other in any order there are none.

    Args:
        bound: The reader's engine.
    """

    def __init__(self, bound: BoundEngine) -> None:
        self._bound, self.chat = bound, bound.engine.chat
        self._made: dict[str, MessageHandle] = {}
        self.root = PlacedView()
        """What all agents see first; what all may see is encoded behind it."""

    async def begin(self, public: str | None) -> None:
        """Encode the root; it is empty if there is nothing to start with."""
        text, chat = self.chat.root(public), self.chat
        if public and chat.leads:
            text = PromptText.special(chat.bos + chat.user.plain) + chat.system.around(public)
            self.root.turn = "begun"
        for handle in await self._shared(text):
            self.root.add(handle)

    async def whole_root(self, public: str | None) -> list[MessageHandle]:
        """The root for what brings its own turns: nothing can be said in a turn of the root's."""
        if self.root.turn == "closed":
            return self.root.handles
        return await self._shared(self.chat.root(public))

    async def default_instructions(self) -> list[MessageHandle]:
        """What the template says where nobody gives instructions."""
        return await self._shared(PromptText.special(self.chat.default_system), self.root.handles)

    async def behind_root(self, kind: Kind) -> Sequence[MessageHandle]:
        """What a shared message is encoded behind."""
        view = self.root.copy()
        await self.lead_to(view, kind)
        return view.handles

    async def lead_to(self, view: PlacedView, kind: Kind) -> None:
        """Append what has to stand before something that is appended next."""
        if self.chat.merges is None:
            return
        if kind == "turn":
            await self.close(view)
            return
        if view.turn == "closed":
            await self._join(view, self.chat.user.plain, "opens a user's turn")
        elif view.turn == "open":
            await self._join(view, self.chat.merges, "goes on with a user's turn")
        view.turn = "open" if kind == "part" else "begun"

    async def tell(self, view: PlacedView, told: Sequence[TurnText], author: str, adapter: str | None) -> None:
        """Append what one agent alone is told."""
        for text, kind in told:
            await self.lead_to(view, kind)
            call = Prefill(text, [*view.handles], [*view.offsets], view.end, author, role="system", adapter=adapter)
            [made] = await self._bound.ask_for([call])
            view.add(made)

    async def close(self, view: PlacedView) -> None:
        """Append what closes a user's turn, if one is open."""
        if view.turn != "closed":
            since = view.end
            await self._join(view, self.chat.user.after, "closes a user's turn")
            view.close(since)

    def length(self, kind: Kind) -> int:
        """Tokens that stand around a message which has a user's turn of its own; a whole turn has all it needs."""
        if kind == "turn" or self.chat.merges is None:
            return 0
        return sum(len(self._bound.engine.model.encode(text)) for text in (self.chat.user.plain, self.chat.user.after))

    async def _join(self, view: PlacedView, text: str, role: str) -> None:
        if not text:
            return
        if text not in self._made:
            [self._made[text]] = await self._shared(PromptText.special(text), self.root.handles, role)
        view.add_separator(self._made[text])

    async def _shared(
        self, text: PromptText, parents: Sequence[MessageHandle] = (), role: str = "system"
    ) -> list[MessageHandle]:
        call = Prefill(text, parents, author=_PUBLIC_ROOT, role=role)
        return await self._bound.ask_for([call] if text else [])
