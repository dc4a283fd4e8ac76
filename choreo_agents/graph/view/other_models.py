"""What other models have said, for a reader: their encodings are nothing to its own, which encodes the words again."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import BaseMessage

from choreo_agents.engine import Engine, Prefill
from choreo_agents.errors import ForeignHandleError
from choreo_agents.graph.by_model import handle_for, is_of_agent, put_in
from choreo_agents.graph.state import HandleEntry
from choreo_agents.graph.view.bound_engine import SharedPrefills
from choreo_agents.graph.view.reencoding import ReaderWords
from choreo_agents.graph.view.user_turns import UserTurns
from choreo_agents.graph.view.view import SeenEntry
from choreo_agents.graph.words.inputs import message_as
from choreo_agents.kv.handle import MessageHandle


class OtherModels:
    """Encodes what one call of one reader sees and its model has no encoding of: behind the public root, as input is,
    once for all readers of that model.

    Args:
        engine: The reader's.
        reader: Its node.
        words: What was said.
        shared: Encodes for all.
        turns: What stands around messages.
        strict: Whether encodings that were to be handed on must be of the reader's model.
    """

    def __init__(
        self, engine: Engine, reader: str, words: ReaderWords, shared: SharedPrefills, turns: UserTurns, *, strict: bool
    ) -> None:
        self._engine = engine
        self._model = engine.model.adapter.fingerprint
        self._reader = reader
        self._words = words
        self._shared = shared
        self._turns = turns
        self._strict = strict

    async def encoded(self, seen: Sequence[SeenEntry], named: Sequence[HandleEntry] = ()) -> list[HandleEntry]:
        """The entries among these that had no encoding of the reader's model, with one. It costs nothing until somebody
        attends to it.

        Args:
            seen: The messages of the view.
            named: Those in which words of the view are encoded, whose own words alone it sees.

        Raises:
            ForeignHandleError: The words are not in the graph's state; or, with `strict`, an encoding was to be read.
        """
        wanted = [each.entry for each in seen if self._is_foreign(each.entry)]
        for entry, rule in seen if self._strict else ():
            if self._is_foreign(entry) and is_of_agent(entry) and rule.mode.hands_on_encodings:
                raise self._refused(entry, "declare it 'reencoded', or compile without strict=True")
        wanted += [entry for entry in named if self._is_foreign(entry)]
        different = list({entry["message_id"]: entry for entry in wanted}.values())
        calls = [await self._prefill(entry) for entry in different]
        handles = await self._shared.ask_for(calls)
        return [put_in(entry, handle) for entry, handle in zip(different, handles, strict=True)]

    def _is_foreign(self, entry: HandleEntry) -> bool:
        return handle_for(entry, self._model) is None

    async def _prefill(self, entry: HandleEntry) -> Prefill:
        message = self._said(entry)
        text, kind = message_as(message, self._engine.chat)
        behind = await self._turns.behind_root(kind)
        source = MessageHandle.model_validate(entry["handle"]) if is_of_agent(entry) else None
        author, confidential = entry["author"], entry["confidential"]
        return Prefill(text, behind, author=author, confidential=confidential, source=source)

    def _said(self, entry: HandleEntry) -> BaseMessage:
        message = self._words.in_state(entry)
        if message is None:
            raise self._refused(entry, "its words are not in the graph's state: send the message itself, too")
        return message

    def _refused(self, entry: HandleEntry, advice: str) -> ForeignHandleError:
        handle = MessageHandle.model_validate(entry["handle"])
        return ForeignHandleError(
            f"what {entry['author']!r} said is handle {handle.id!r} of model {handle.base_model!r}, and "
            f"{self._reader!r} runs on {self._model!r}: {advice}"
        )
