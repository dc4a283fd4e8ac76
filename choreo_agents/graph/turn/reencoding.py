"""Words that are encoded again: which they are, and the private contexts that they are encoded in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from langchain_core.messages import BaseMessage

from choreo_agents.engine import Prefill
from choreo_agents.errors import VisibilityError
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.turn.bound_engine import BoundEngine
from choreo_agents.graph.turn.inputs import turn_of
from choreo_agents.graph.turn.reader_rules import ReaderRules
from choreo_agents.graph.turn.run_place import RunPlace
from choreo_agents.graph.visibility import VisibilityMode
from choreo_agents.kv.handle import MessageHandle

AskFor = Callable[[Sequence[Prefill]], Awaitable[list[MessageHandle]]]


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

    def hear(self, messages: Sequence[BaseMessage]) -> None:
        """Add words that were said meanwhile."""
        self._said |= {str(message.id): message for message in messages}

    def of(self, entry: HandleEntry) -> BaseMessage | None:
        """A message that the reader has in its view, in the words that it has of it; None if nobody sent them."""
        name = entry["message_id"]
        return self._reworded.get(name, self._said.get(name))

    def length(self, entry: HandleEntry, mode: VisibilityMode) -> int:
        """How many tokens the message takes in the view."""
        return int(entry["handle"]["length"]) if mode.reword is None else len(self._in_other_words(entry, mode))

    def tokens(self, entry: HandleEntry, handle: MessageHandle, mode: VisibilityMode) -> list[int]:
        """What is to be encoded again: the message's own tokens, or its turn in the words that the mode makes of it.

        Raises:
            VisibilityError: It is to be re-worded, and the reader was sent its handle without its words.
        """
        if mode.reword is None:
            return self._bound.tokens(self._bound.grant(handle, words_only=True))
        return self._in_other_words(entry, mode)

    def _in_other_words(self, entry: HandleEntry, mode: VisibilityMode) -> list[int]:
        name, engine = entry["message_id"], self._bound.engine
        if name not in self._said:
            raise VisibilityError(
                f"what {entry['author']!r} said is to be re-worded ({mode.name}), and its handle was sent without its "
                f"words: send message {name!r} itself, too, as choreo_agents.send does"
            )
        if name not in self._reworded:
            said = self._said[name]
            self._reworded[name] = said.model_copy(update={"content": mode.says(str(said.text))})
        return list(engine.model.encode(turn_of(self._reworded[name], engine.chat)))


async def named_context(
    name: str,
    parents: Sequence[MessageHandle],
    place: RunPlace,
    rules: ReaderRules,
    entries: Sequence[HandleEntry],
    bound: BoundEngine,
    ask_for: AskFor,
) -> list[MessageHandle]:
    """The messages of a private context, encoded after the root and the contexts named before.

    Args:
        name: As its graph calls it.
        parents: What they are encoded after.
        place: Of the reader, and `rules` by which it reads.
        entries: All that was said.
        bound: Its engine, and `ask_for` what encodes for it.
    """
    home = place.author.rpartition("|")[0]
    path = f"{home}|{name}" if home else name
    made: list[MessageHandle] = []
    for text in rules.systems.get(name, ()):
        turn = bound.engine.chat.turn("system", text)
        made += await ask_for([Prefill(turn, [*parents, *made], author=path, role="system")])
    if name not in rules.systems and name not in rules.confidential:
        raise VisibilityError(f"there is no private context {name!r} that words could be encoded in")
    for entry in sorted(entries, key=lambda one: one["superstep"]):
        if entry["author"] == path and entry["confidential"]:
            handle = MessageHandle.model_validate(entry["handle"])
            words = bound.tokens(bound.grant(handle, words_only=True))
            call = Prefill(words, [*parents, *made], author=path, confidential=True, source=handle)
            made += await ask_for([call])
    return made
