"""Words as what is to be encoded: as a reader gets them, and the private contexts that they are encoded in again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage

from choreo_agents.chat import message_turn, tools_called
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.signer import opening_of
from choreo_agents.graph.state import HandleEntry, length_for
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.call_id import CallId
from choreo_agents.graph.visibility import VisibilityMode
from choreo_agents.graph.words.entries import is_input
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import Kind, PromptText, instructions


class ReaderWords:
    """The words of messages, as one call of one reader gets them.

    Args:
        bound: The reader's engine.
        messages: The words in the graph's state.
    """

    def __init__(self, bound: BoundEngine, messages: Sequence[BaseMessage]) -> None:
        self._bound = bound
        self._said = {str(message.id): message for message in messages}
        self._reworded: dict[str, BaseMessage] = {}

    def of(self, entry: HandleEntry) -> BaseMessage | None:
        """A message that the reader has in its view, in the words that it has of it; None if nobody sent them."""
        name = entry["message_id"]
        return self._reworded.get(name, self._said.get(name))

    def seen(self, entry: HandleEntry, mode: VisibilityMode) -> BaseMessage | None:
        """A message in the words that a mode makes of it for the reader; None if nobody sent them."""
        said = self.in_state(entry)
        return said if said is None or mode.transform is None else self._in_mode(entry, said, mode)

    def in_state(self, entry: HandleEntry) -> BaseMessage | None:
        """A message in its own words; None if nobody sent them."""
        return self._said.get(entry["message_id"])

    def length(self, entry: HandleEntry, mode: VisibilityMode) -> int:
        """How many tokens the message takes in the view."""
        if mode.transform is None:
            return length_for(entry, self._bound.model)
        return len(self._in_other_words(entry, mode, later=True, told=True)[0])

    def kind(self, entry: HandleEntry) -> Kind:
        """As what the encoding of a message stands in a view."""
        said, chat = self._said.get(entry["message_id"]), self._bound.engine.chat
        if chat.merges is not None and isinstance(said, ToolMessage):
            return message_turn(said, chat).kind
        if chat.merges is None or isinstance(said, AIMessage) or (said is None and "persona" in entry):
            return "turn"
        return instructions("", chat, later=True).kind if isinstance(said, SystemMessage) else "part"

    def instructs(self, entry: HandleEntry) -> bool:
        """Whether a message gives instructions."""
        return isinstance(self._said.get(entry["message_id"]), SystemMessage)

    def first(self, entry: HandleEntry, handle: MessageHandle) -> PromptText | None:
        """Instructions as they stand where nothing comes before them, if that is not how they were encoded."""
        engine = self._bound.engine
        if not self.instructs(entry):
            return None
        text = message_turn(self._said[entry["message_id"]], engine.chat, later=False).text
        known = self._bound.tokens(self._bound.grant(handle, words_only=True))
        return None if engine.model.encode(text) == known else text

    def again(
        self, entry: HandleEntry, handle: MessageHandle, mode: VisibilityMode, *, later: bool = True, own: bool = False
    ) -> tuple[list[int], Kind]:
        """What is to be encoded again, and as what: the message's own tokens, or the words that the mode makes of it.

        Where users and model take turns, what another agent has said becomes a part of a user's turn.

        Args:
            entry: The message.
            handle: Of its encoding.
            mode: In which its reader sees it.
            later: Whether anything stands before it in what it is encoded behind.
            own: Whether it is the reader's own.

        Raises:
            VisibilityError: It is to be re-worded, and the reader was sent its handle without its words.
        """
        told, engine = not own and not is_input(entry), self._bound.engine
        if mode.transform is not None:
            return self._in_other_words(entry, mode, later=later, told=told)
        tokens = self._bound.tokens(self._bound.grant(handle, words_only=True))
        said, kind = self._said.get(entry["message_id"]), self.kind(entry)
        if not later and (text := self.first(entry, handle)) is not None:
            return list(engine.model.encode(text)), instructions("", engine.chat, later=False).kind
        if engine.chat.merges is None or kind != "turn" or not told:
            return tokens, kind
        if isinstance(said, AIMessage):
            text, kind = message_turn(said, engine.chat, told=True, opening=opening_of(said))
            return list(engine.model.encode(text)), kind
        # Nobody has sent the words of an answer: they are read off its tokens.
        return (engine.model.encode(engine.model.part_of(tokens)), "part") if said is None else (tokens, kind)

    def _in_other_words(
        self, entry: HandleEntry, mode: VisibilityMode, *, later: bool, told: bool
    ) -> tuple[list[int], Kind]:
        name, engine = entry["message_id"], self._bound.engine
        if name not in self._said:
            raise VisibilityError(
                f"what {entry['author']!r} said is to be re-worded ({mode.name}), and its handle was sent without its "
                f"words: send message {name!r} itself, too, as choreo_agents.send does"
            )
        called, reworded = tools_called(self._said.values()), self._in_mode(entry, self._said[name], mode)
        opening = opening_of(reworded)
        text, kind = message_turn(reworded, engine.chat, later=later, told=told, called=called, opening=opening)
        return list(engine.model.encode(text)), kind

    def _in_mode(self, entry: HandleEntry, said: BaseMessage, mode: VisibilityMode) -> BaseMessage:
        name = entry["message_id"]
        if name not in self._reworded:
            # Of calls it says nothing: what they were called with is part of what it re-words.
            calls: dict[str, Any] = {"tool_calls": [], "invalid_tool_calls": []} if isinstance(said, AIMessage) else {}
            self._reworded[name] = said.model_copy(update={"content": mode.apply(str(said.text)), **calls})
        return self._reworded[name]


def context_path(name: str, place: CallId) -> str:
    """A private context's name, behind the subgraphs that its reader stands in."""
    home = place.author.rpartition("|")[0]
    return f"{home}|{name}" if home else name


def confidential_of(path: str, entries: Sequence[HandleEntry]) -> list[HandleEntry]:
    """The messages of a private context that is a node's, in the order in which they were said."""
    said = [entry for entry in entries if entry["author"] == path and entry["confidential"]]
    return sorted(said, key=lambda one: one["superstep"])
