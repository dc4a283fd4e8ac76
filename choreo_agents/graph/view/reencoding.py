"""Text of messages for re-encoding: as one reader gets it, after the transforms of visibility modes."""

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
    """The text of messages as one call of one reader gets it.

    Args:
        bound: The reader's engine.
        messages: The messages in the graph's state.
    """

    def __init__(self, bound: BoundEngine, messages: Sequence[BaseMessage]) -> None:
        self._bound = bound
        self._messages = {str(message.id): message for message in messages}
        self._transformed: dict[str, BaseMessage] = {}

    def as_read(self, entry: HandleEntry) -> BaseMessage | None:
        """Return a message with the text that the reader has in its view; None if the state has only its handle."""
        name = entry["message_id"]
        return self._transformed.get(name, self._messages.get(name))

    def in_mode(self, entry: HandleEntry, mode: VisibilityMode) -> BaseMessage | None:
        """Return a message with the text that a mode makes of it; None if the state has only its handle."""
        message = self.in_state(entry)
        return message if message is None or mode.transform is None else self._transform(entry, message, mode)

    def in_state(self, entry: HandleEntry) -> BaseMessage | None:
        """Return a message with its own text; None if the state has only its handle."""
        return self._messages.get(entry["message_id"])

    def length(self, entry: HandleEntry, mode: VisibilityMode) -> int:
        """Return the number of tokens that the message takes in the view."""
        if mode.transform is None:
            return length_for(entry, self._bound.model)
        return len(self._transformed_tokens(entry, mode, later=True, by_other=True)[0])

    def kind(self, entry: HandleEntry) -> Kind:
        """Return the kind of turn that the message's encoding is in a view."""
        message, chat = self._messages.get(entry["message_id"]), self._bound.engine.chat
        if chat.merges is not None and isinstance(message, ToolMessage):
            return message_turn(message, chat).kind
        if chat.merges is None or isinstance(message, AIMessage) or (message is None and "persona" in entry):
            return "turn"
        return instructions("", chat, later=True).kind if isinstance(message, SystemMessage) else "part"

    def instructs(self, entry: HandleEntry) -> bool:
        """Return whether a message is a system message."""
        return isinstance(self._messages.get(entry["message_id"]), SystemMessage)

    def as_first(self, entry: HandleEntry, handle: MessageHandle) -> PromptText | None:
        """Return instructions as a template writes them at the start of a prompt; None if they were encoded that
        way."""
        engine = self._bound.engine
        if not self.instructs(entry):
            return None
        text = message_turn(self._messages[entry["message_id"]], engine.chat, later=False).text
        tokens = self._bound.tokens(self._bound.grant(handle, words_only=True))
        return None if engine.model.encode(text) == tokens else text

    def tokens_of(
        self, entry: HandleEntry, handle: MessageHandle, mode: VisibilityMode, *, later: bool = True, own: bool = False
    ) -> tuple[list[int], Kind]:
        """Return the tokens to encode again, and their kind: the message's own, or those of the text that the mode
        makes of it.

        Where users and model take turns, another agent's message becomes a part of a user's turn.

        Args:
            entry: The message.
            handle: The handle of its encoding.
            mode: The mode in which the reader sees it.
            later: True if anything stands before it.
            own: True if it is the reader's own.

        Raises:
            VisibilityError: The mode transforms text, and the reader was sent the handle without its message.
        """
        by_other, engine = not own and not is_input(entry), self._bound.engine
        if mode.transform is not None:
            return self._transformed_tokens(entry, mode, later=later, by_other=by_other)
        tokens = self._bound.tokens(self._bound.grant(handle, words_only=True))
        message, kind = self._messages.get(entry["message_id"]), self.kind(entry)
        if not later and (text := self.as_first(entry, handle)) is not None:
            return list(engine.model.encode(text)), instructions("", engine.chat, later=False).kind
        if engine.chat.merges is None or kind != "turn" or not by_other:
            return tokens, kind
        if isinstance(message, AIMessage):
            text, kind = message_turn(message, engine.chat, quoted=True, opening=opening_of(message))
            return list(engine.model.encode(text)), kind
        # The state has an answer's handle without its message: its text is read off its tokens.
        return (engine.model.encode(engine.model.as_user_part(tokens)), "part") if message is None else (tokens, kind)

    def _transformed_tokens(
        self, entry: HandleEntry, mode: VisibilityMode, *, later: bool, by_other: bool
    ) -> tuple[list[int], Kind]:
        name, engine = entry["message_id"], self._bound.engine
        if name not in self._messages:
            raise VisibilityError(
                f"what {entry['author']!r} said is to be re-worded ({mode.name}), and its handle was sent without its "
                f"words: send message {name!r} itself, too, as choreo_agents.send does"
            )
        called, reworded = tools_called(self._messages.values()), self._transform(entry, self._messages[name], mode)
        opening = opening_of(reworded)
        text, kind = message_turn(reworded, engine.chat, later=later, quoted=by_other, called=called, opening=opening)
        return list(engine.model.encode(text)), kind

    def _transform(self, entry: HandleEntry, words: BaseMessage, mode: VisibilityMode) -> BaseMessage:
        name = entry["message_id"]
        if name not in self._transformed:
            # The transform gets text alone: tool calls are dropped, as their arguments could carry what it removes.
            calls: dict[str, Any] = {"tool_calls": [], "invalid_tool_calls": []} if isinstance(words, AIMessage) else {}
            self._transformed[name] = words.model_copy(update={"content": mode.apply(str(words.text)), **calls})
        return self._transformed[name]


def context_path(name: str, place: CallId) -> str:
    """Return a private context's name behind the subgraphs of its reader."""
    home = place.author.rpartition("|")[0]
    return f"{home}|{name}" if home else name


def confidential_of(path: str, entries: Sequence[HandleEntry]) -> list[HandleEntry]:
    """Return a node's confidential messages by superstep."""
    confidential = [entry for entry in entries if entry["author"] == path and entry["confidential"]]
    return sorted(confidential, key=lambda entry: entry["superstep"])
