"""What the tokens of one message say: words, and calls of tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.messages import InvalidToolCall
from langchain_core.messages import ToolCall as CallMessage
from langchain_core.messages.tool import invalid_tool_call, tool_call

from choreo_agents.chat.constraints import CallsOrAnswer
from choreo_agents.chat.turns import short_id
from choreo_agents.engine.constraints import Detokenizer
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import BrokenCall, CallPart, LoadedModel, PromptText, TextPart, ToolCall, tools_format

Called = CallMessage | InvalidToolCall
"""A call that can be made, or one that cannot, and why."""
_EVERYWHERE = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
"""Names that calls of every form can be written with."""


def require_names(model: LoadedModel, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidRequestError` if calls of a tool, with all that it requires, are not read as they are written."""
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        required = [each for each in schema.get("required") or () if isinstance(each, str)]
        if all(map(_EVERYWHERE.fullmatch, (name, *required))):
            continue
        call = ToolCall(name, dict.fromkeys(required, "."), short_id(name))
        read = OutputParser(model, tools, "").whole(model.encode(tools_format(model.chat).grammar.write([call]))).calls
        if [(each["name"], each["args"]) for each in read] != [(name, call.arguments)]:
            raise InvalidRequestError(
                f"this model cannot write a call of {name!r} with {', '.join(map(repr, required)) or 'nothing'} that "
                "is read as one: rename the tool, or what it requires, to letters, digits and underscores"
            )


class OutputParser:
    """Of one message.

    Args:
        model: Whose tokens they are.
        tools: What its speaker may call.
        place: Names the call of the agent: ids of its calls are made of it, the same whenever it is run again.
        way: Tells whether it calls or answers in a form; None: it may do both, in any words.
    """

    def __init__(
        self, model: LoadedModel, tools: Sequence[Mapping[str, Any]], place: str, way: CallsOrAnswer | None = None
    ) -> None:
        self._model = model
        self._reader = tools_format(model.chat).reader(tools, [*model.controls.values()], model.shown)
        self._place, self._way = place, way
        ending = [] if tools_format(model.chat).is_headed else model.encode(PromptText.special(model.chat.turn_end))[:1]
        self._ends = {*model.adapter.end_tokens, *ending}
        self._texts = Detokenizer(model)
        self._run: list[int] = []
        """Since the last control token, ..."""
        self._told = ""
        """... and what was told of its text."""
        self.calls: list[Called] = []
        """All calls of the message: those that can be made, and those that cannot."""

    def whole(self, tokens: Iterable[int]) -> OutputParser:
        """Itself, when it has read all of a message's tokens."""
        for known in (*map(self._known, tokens), self._known()):
            for token in known:
                self._add(token, "")  # whole texts are decoded at once
        self.end()
        return self

    def add(self, token: int) -> list[str | Called]:
        """Return the words and calls that the next token completes."""
        return self._read(self._known(token))

    def _read(self, tokens: Sequence[int]) -> list[str | Called]:
        controls, texts = self._model.controls, self._texts
        return [each for token in tokens for each in self._add(token, "" if token in controls else texts.add(token))]

    def _known(self, *token: int) -> list[int]:
        """The tokens that can be read with this one, or when nothing follows: none, until it is known what they are."""
        if (way := self._way) is None:
            return [*token]
        is_answer = way.take(*token) if token else way.ended()
        if is_answer is None:
            return []
        if is_answer:
            self._reader.only_words()
        self._way = None
        return way.tokens

    def _add(self, token: int, text: str) -> list[str | Called]:
        """The same, given what it adds to the text: what nobody has told comes when the text ends."""
        control = self._model.controls.get(token)
        if control is None:
            self._run.append(token)
            self._told += text
            return self._heard(self._reader.add(text)) if text else []
        rest = self._rest()
        return rest if token in self._ends else [*rest, *self._heard(self._reader.add(control, is_control=True))]

    def end(self) -> list[str | Called]:
        """What is left when nothing follows."""
        return [*self._read(self._known()), *self._rest(), *self._heard(self._reader.end())]

    def _rest(self) -> list[str | Called]:
        """Return what the text since the last control token says beyond what was told of it."""
        text, told = self._model.decode(self._run, special=False) if self._run else "", self._told
        self._run, self._told, self._texts = [], "", Detokenizer(self._model)
        return self._heard(self._reader.add(text[len(told) :])) if text != told and text.startswith(told) else []

    def _heard(self, heard: Sequence[TextPart | CallPart]) -> list[str | Called]:
        return [each.text if isinstance(each, TextPart) else self._called(each.number) for each in heard]

    def _called(self, number: int) -> Called:
        call = self._reader.calls[number]
        if isinstance(call, BrokenCall):
            made: Called = invalid_tool_call(name=call.name, args=call.text, id=self._id(number), error=call.why)
        else:
            made = tool_call(name=call.name, args=dict(call.arguments), id=self._id(number))
        self.calls.append(made)
        return made

    @property
    def words(self) -> str:
        """All that is said beside calls."""
        return self._reader.words.strip()

    def _id(self, number: int) -> str:
        return short_id(hashlib.sha256(f"{self._place} {number}".encode()).hexdigest())
