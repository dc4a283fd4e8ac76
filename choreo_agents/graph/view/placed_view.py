"""Positions of a view's messages, sequential or parallel, and the separators that chat templates need between turns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from choreo_agents.chat import UserTurn, separator
from choreo_agents.engine import Prefill
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import Kind, PromptText, TurnText

# Roles of separators
_CLOSES = "closes a user's turn"
_GOES_ON = {"closed": "opens a user's turn", "begun": "", "open": "goes on with a user's turn"}


@dataclass
class PlacedView:
    """Handles in attention order, each with its position."""

    handles: list[MessageHandle] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0
    """The first free position: what follows starts there."""
    ends: dict[str, int] = field(default_factory=dict)
    """The position after each message, by its id and by that of the message that it stands for."""
    turn: UserTurn = "closed"
    """State of the last user's turn, which others can continue (see `TurnMerger`)."""

    def add(self, handle: MessageHandle, offset: int | None = None, stands_for: MessageHandle | None = None) -> None:
        """Append a message, by default at the end."""
        at = self.end if offset is None else offset
        self.ends |= {message.id: at + handle.length for message in (handle, stands_for or handle)}
        self.append(handle, at)

    def add_beside(self, handle: MessageHandle, offset: int) -> None:
        """Append a message without moving the end: what follows starts where it would have started."""
        self.handles.append(handle)
        self.offsets.append(offset)

    def extend(self, view: PlacedView, first: int) -> None:
        """Append the messages of another view from index `first` on, at their positions."""
        for handle, offset in zip(view.handles[first:], view.offsets[first:], strict=True):
            self.append(handle, offset)
        self.ends |= view.ends
        self.turn = view.turn

    def close(self, since: int) -> None:
        """Mark the user's turn as closed; the separator since position `since` counts as part of the last message."""
        self.ends |= {message_id: self.end for message_id, end in self.ends.items() if end == since}
        self.turn = "closed"

    def end_of(self, ids: Collection[str]) -> int:
        """Return the end of the last of these messages; the view's end if none of them is in it."""
        return max((end for message_id, end in self.ends.items() if message_id in ids), default=self.end)

    def copy(self) -> PlacedView:
        return PlacedView([*self.handles], [*self.offsets], self.end, {**self.ends}, self.turn)

    def append(self, handle: MessageHandle, at: int) -> None:
        """Append a handle without an end of its own: a separator, which is no message and may stand in many places."""
        self.add_beside(handle, at)
        self.end = max(self.end, at + handle.length)


class TurnMerger:
    """Puts all messages between two of the model's own turns into one user's turn (see `separator`).

    Messages are parts, which may stand anywhere in any view. The separators that open a user's turn, stand between two
    parts and close it are a few tokens each; they are encoded once, behind the root, and carry nothing private.
    Templates that allow turns in any order need none.

    Args:
        bound: The reader's engine.
    """

    def __init__(self, bound: BoundEngine) -> None:
        self._bound, self.chat = bound, bound.engine.chat
        self._separators: dict[str, MessageHandle] = {}
        self.root = PlacedView()
        """The messages that all agents see first; shared messages are encoded behind them."""

    async def begin(self, public: str | None) -> None:
        """Encode the root; it is empty if there is nothing to start with."""
        text, chat = self.chat.root(public), self.chat
        if public and chat.leads:
            text = PromptText.special(chat.bos + chat.user.plain) + chat.system.around(public)
            self.root.turn = "begun"
        for handle in await self._shared(text):
            self.root.add(handle)

    async def whole_root(self, public: str | None) -> list[MessageHandle]:
        """Return the root for a prompt that brings its own turns: no user's turn may be open in it."""
        if self.root.turn == "closed":
            return self.root.handles
        return await self._shared(self.chat.root(public))

    async def default_instructions(self) -> list[MessageHandle]:
        """Return the template's default system prompt, for views without instructions."""
        return await self._shared(PromptText.special(self.chat.default_system), self.root.handles)

    async def behind_root(self, kind: Kind) -> Sequence[MessageHandle]:
        """Return the handles that a shared message of this kind is encoded behind."""
        view = self.root.copy()
        await self.prepare_for(view, kind)
        return view.handles

    async def prepare_for(self, view: PlacedView, kind: Kind) -> None:
        """Append the separator that a message of this kind needs before it."""
        since, (text, turn) = view.end, separator(view.turn, kind, self.chat)
        role = _CLOSES if kind == "turn" else _GOES_ON[view.turn]
        if text and text not in self._separators:
            [self._separators[text]] = await self._shared(PromptText.special(text), self.root.handles, role)
        if text:
            view.append(self._separators[text], view.end)
        if turn == "closed":
            view.close(since)
        view.turn = turn

    async def append_turns(self, view: PlacedView, turns: Sequence[TurnText], author: str, adapter: str | None) -> None:
        """Append turns that one agent alone is given, such as its system prompt."""
        for text, kind in turns:
            await self.prepare_for(view, kind)
            call = Prefill(text, [*view.handles], [*view.offsets], view.end, author, role="system", adapter=adapter)
            [handle] = await self._bound.prefill_shared([call])
            view.add(handle)

    async def close(self, view: PlacedView) -> None:
        """Append the separator that closes a user's turn, if one is open."""
        await self.prepare_for(view, "turn")

    def length(self, kind: Kind) -> int:
        """Return the number of tokens around a message that has a user's turn of its own; a whole turn needs none."""
        if kind == "turn" or self.chat.merges is None:
            return 0
        return sum(len(self._bound.engine.model.encode(text)) for text in (self.chat.user.plain, self.chat.user.after))

    async def _shared(
        self, text: PromptText, parents: Sequence[MessageHandle] = (), role: str = "system"
    ) -> list[MessageHandle]:
        call = Prefill(text, parents, author="public root", role=role)
        return await self._bound.prefill_shared([call] if text else [])
