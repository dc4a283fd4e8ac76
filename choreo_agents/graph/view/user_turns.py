"""What stands around what others say, where a chat template lets users and model take turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from choreo_agents.engine import Prefill
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import FramedText, Kind, LoadedModel, Said

AskFor = Callable[[Sequence[Prefill]], Awaitable[list[MessageHandle]]]
_PUBLIC_ROOT = "public root"


class UserTurns:
    """Puts all that others say between two of the model's turns into one user's turn.

        root | open | question | between | bob: ... | close | the reader's own turn | open | question | close | header

    Messages are parts, which anybody can see anywhere. What opens a user's turn, stands between two parts and closes it
    (the joints) are spans of a few tokens, which each view has where it needs them; each is encoded once, behind the
    root, and says nothing of anybody. Where turns may follow each other in any order there are none.

    Args:
        model: Whose template it is.
        ask_for: Encodes what is shared by all agents.
    """

    def __init__(self, model: LoadedModel, ask_for: AskFor) -> None:
        self._model = model
        self.chat = model.chat
        self.ask_for = ask_for
        self._made: dict[str, MessageHandle] = {}
        self.root = PlacedView()
        """What all agents see first; what all may see is encoded behind it."""

    async def begin(self, public: str | None) -> None:
        """Encode the root; it is empty if there is nothing to start with."""
        text, chat = self.chat.root(public), self.chat
        if public and chat.leads:
            text = FramedText.frame(chat.bos + chat.user.plain) + chat.system.around(public)
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
        return await self._shared(FramedText.frame(self.chat.default_system), self.root.handles)

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

    async def tell(self, view: PlacedView, told: Sequence[Said], author: str, adapter: str | None) -> None:
        """Append what one agent alone is told."""
        for text, kind in told:
            await self.lead_to(view, kind)
            call = Prefill(text, [*view.handles], [*view.offsets], view.end, author, role="system", adapter=adapter)
            [made] = await self.ask_for([call])
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
        return sum(len(self._model.encode(text)) for text in (self.chat.user.plain, self.chat.user.after))

    async def _join(self, view: PlacedView, text: str, role: str) -> None:
        if not text:
            return
        if text not in self._made:
            [self._made[text]] = await self._shared(FramedText.frame(text), self.root.handles, role)
        view.add_joint(self._made[text])

    async def _shared(
        self, text: FramedText, parents: Sequence[MessageHandle] = (), role: str = "system"
    ) -> list[MessageHandle]:
        call = Prefill(text, parents, author=_PUBLIC_ROOT, role=role)
        return await self.ask_for([call] if text else [])
