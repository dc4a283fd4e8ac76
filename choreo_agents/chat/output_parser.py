"""Parser of sampled tokens into text and tool calls."""

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
"""A valid call, or an invalid one with its error."""
_EVERYWHERE = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
"""Names that every call format can write."""


def require_names(model: LoadedModel, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidRequestError` if a written call of a tool, with its required arguments, is not parsed back."""
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        required = [field for field in schema.get("required") or () if isinstance(field, str)]
        if all(map(_EVERYWHERE.fullmatch, (name, *required))):
            continue
        call = ToolCall(name, dict.fromkeys(required, "."), short_id(name))
        read = OutputParser(model, tools, "").parse(model.encode(tools_format(model.chat).grammar.write([call]))).calls
        if [(parsed["name"], parsed["args"]) for parsed in read] != [(name, call.arguments)]:
            raise InvalidRequestError(
                f"this model cannot write a parsable call of {name!r} with "
                f"{', '.join(map(repr, required)) or 'nothing'}: rename the tool or its arguments, with letters, "
                "digits and underscores only"
            )


class OutputParser:
    """Parser of one message.

    Args:
        model: Model that sampled the tokens.
        tools: Tools that it may call.
        place: Name of the agent's call. Ids of tool calls are derived from it, so that a re-run gives the same ids.
        decider: Decides between calls and a constrained answer; None: both may occur, in free text.
    """

    def __init__(
        self, model: LoadedModel, tools: Sequence[Mapping[str, Any]], place: str, decider: CallsOrAnswer | None = None
    ) -> None:
        self._model = model
        self._reader = tools_format(model.chat).reader(tools, [*model.controls.values()], model.visible_controls)
        self._place, self._decider = place, decider
        ending = [] if tools_format(model.chat).is_headed else model.encode(PromptText.special(model.chat.turn_end))[:1]
        self._ends = {*model.adapter.end_tokens, *ending}
        self._texts = Detokenizer(model)
        self._run: list[int] = []
        """Tokens since the last control token, ..."""
        self._shown = ""
        """... and the part of their text that was returned."""
        self.calls: list[Called] = []
        """All calls of the message, valid and invalid."""

    def parse(self, tokens: Iterable[int]) -> OutputParser:
        """Parse a whole message, and return self."""
        for ready in (*map(self._ready_tokens, tokens), self._ready_tokens()):
            for token in ready:
                self._add(token, "")  # whole texts are decoded at once
        self.end()
        return self

    def add(self, token: int) -> list[str | Called]:
        """Return the text and calls that the next token completes."""
        return self._read(self._ready_tokens(token))

    def _read(self, tokens: Sequence[int]) -> list[str | Called]:
        controls, texts = self._model.controls, self._texts
        return [part for token in tokens for part in self._add(token, "" if token in controls else texts.add(token))]

    def _ready_tokens(self, *token: int) -> list[int]:
        """Return the tokens that can be parsed now, with the next one or at the end: none while it is undecided."""
        if (decider := self._decider) is None:
            return [*token]
        is_answer = decider.take(*token) if token else decider.ended()
        if is_answer is None:
            return []
        if is_answer:
            self._reader.disable_calls()
        self._decider = None
        return decider.tokens

    def _add(self, token: int, text: str) -> list[str | Called]:
        """Parse a token that adds this text; text that is still missing comes with `_flush`."""
        control = self._model.controls.get(token)
        if control is None:
            self._run.append(token)
            self._shown += text
            return self._convert(self._reader.add(text)) if text else []
        parts = self._flush()
        return parts if token in self._ends else [*parts, *self._convert(self._reader.add(control, is_control=True))]

    def end(self) -> list[str | Called]:
        """Return what is left at the end of the message."""
        return [*self._read(self._ready_tokens()), *self._flush(), *self._convert(self._reader.end())]

    def _flush(self) -> list[str | Called]:
        """Return the rest of the text since the last control token, decoded as a whole."""
        text, shown = self._model.decode(self._run, special=False) if self._run else "", self._shown
        self._run, self._shown, self._texts = [], "", Detokenizer(self._model)
        return self._convert(self._reader.add(text[len(shown) :])) if text != shown and text.startswith(shown) else []

    def _convert(self, parts: Sequence[TextPart | CallPart]) -> list[str | Called]:
        return [part.text if isinstance(part, TextPart) else self._add_call(part.number) for part in parts]

    def _add_call(self, number: int) -> Called:
        call = self._reader.calls[number]
        if isinstance(call, BrokenCall):
            result: Called = invalid_tool_call(name=call.name, args=call.text, id=self._id(number), error=call.why)
        else:
            result = tool_call(name=call.name, args=dict(call.arguments), id=self._id(number))
        self.calls.append(result)
        return result

    @property
    def words(self) -> str:
        """The text beside calls."""
        return self._reader.words.strip()

    def _id(self, number: int) -> str:
        return short_id(hashlib.sha256(f"{self._place} {number}".encode()).hexdigest())
