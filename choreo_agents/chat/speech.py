"""What the tokens of one message say: words, and calls of tools."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import InvalidToolCall
from langchain_core.messages import ToolCall as CallMessage
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk

from choreo_agents.chat.history import short_id
from choreo_agents.models import BrokenCall, CallPart, LoadedModel, SaidWords, tools_format


class Speech:
    """Of one message.

    Args:
        model: Whose tokens they are.
        tools: What its speaker may call.
        place: Names the call of the agent: ids of its calls are made of it, the same whenever it is run again.
    """

    def __init__(self, model: LoadedModel, tools: Sequence[Mapping[str, Any]], place: str) -> None:
        self._model = model
        self._reader = tools_format(model.chat).reader(tools, [*model.controls.values()], model.shown)
        self._place = place

    @classmethod
    def of(cls, model: LoadedModel, tools: Sequence[Mapping[str, Any]], place: str, tokens: Sequence[int]) -> Speech:
        """What all of a message's tokens say."""
        said = cls(model, tools, place)
        run: list[int] = []
        for token in tokens:
            if token in model.controls:
                said._add_run(run)
                said._reader.add(model.controls[token], is_control=True)
                run = []
            else:
                run.append(token)
        said._add_run(run)
        said._reader.end()
        return said

    def _add_run(self, run: list[int]) -> None:
        if run:
            self._reader.add(self._model.decode(run, special=False))

    def add(self, token: int, text: str) -> list[str | ToolCallChunk]:
        """What the next token says, whose text it is: words, and pieces of calls."""
        control = self._model.controls.get(token)
        heard = self._reader.add(text) if control is None else self._reader.add(control, is_control=True)
        return self._shown(heard)

    def end(self) -> list[str | ToolCallChunk]:
        """What is left when nothing follows."""
        return self._shown(self._reader.end())

    def _shown(self, heard: Sequence[SaidWords | CallPart]) -> list[str | ToolCallChunk]:
        return [
            each.text
            if isinstance(each, SaidWords)
            else tool_call_chunk(
                name=each.name,
                args=each.arguments,
                id=None if each.name is None else self._id(each.number),
                index=each.number,
            )
            for each in heard
        ]

    @property
    def words(self) -> str:
        """All that is said beside calls."""
        return self._reader.words.strip()

    @property
    def calls(self) -> list[CallMessage]:
        """The calls that can be made."""
        return [
            tool_call(name=call.name, args=dict(call.arguments), id=self._id(number))
            for number, call in enumerate(self._reader.calls)
            if not isinstance(call, BrokenCall)
        ]

    @property
    def broken(self) -> list[InvalidToolCall]:
        """Those that cannot, and why."""
        return [
            invalid_tool_call(name=call.name, args=call.text, id=self._id(number), error=call.why)
            for number, call in enumerate(self._reader.calls)
            if isinstance(call, BrokenCall)
        ]

    def _id(self, number: int) -> str:
        return short_id(hashlib.sha256(f"{self._place} {number}".encode()).hexdigest())
