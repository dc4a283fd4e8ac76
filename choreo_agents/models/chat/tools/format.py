"""Writes tool calls and their results as turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from choreo_agents.models.chat.tools.grammar import ID, CallGrammar, ToolCall
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.chat.tools.reading import ToolCallReader
from choreo_agents.models.prompt_text import PromptText

TOOL = "\u241ftool\u241f"
"""Placeholder of the tool's name in rendered templates."""
Tell = Callable[[Sequence[Mapping[str, Any]], str | None], PromptText | None]
"""Writes the description of tools and an optional system prompt as the template does; None: it raises."""


@dataclass(frozen=True)
class ResultFormat:
    """The turn of a tool's result, with placeholders `TOOL` for its name and `ID` for the call's id."""

    before: str
    after: str
    quotes: bool = False
    """Whether the result is written as a JSON string."""

    def around(self, words: str, tool: str, call: str) -> PromptText:
        """Return the whole turn of a result."""
        text, names = PromptText.plain(to_json(words) if self.quotes else words), {TOOL: tool, ID: call}
        return PromptText.filled(self.before, names) + text + PromptText.filled(self.after, names)


@dataclass(frozen=True)
class ToolsFormat:
    """The format of a model's tool descriptions, calls and results."""

    grammar: CallGrammar
    opening: str
    """Header of a turn that may call tools."""
    lead: str = ""
    """Text between the header and the answer's text."""
    separator: str = "\n"
    """Text between the answer's text and its calls."""
    words_end: str = ""
    """Text that closes a turn without calls."""
    call_end: str = ""
    """Text that closes a turn with calls."""
    result: ResultFormat | None = None
    """Format of results; None: they are users' messages."""
    tell: Tell | None = field(default=None, repr=False, compare=False)
    """Writes tool descriptions; None: they are instructions in a format of ours."""

    @property
    def is_headed(self) -> bool:
        """True if the tool's name is in the header of the turn."""
        return self.grammar.kind == "headed"

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that close a turn with calls, if they differ from what closes other turns."""
        return (self.call_end,) if self.call_end != self.words_end else ()

    def turn(self, words: str, calls: Sequence[ToolCall]) -> PromptText:
        """Write a turn that calls tools, after an optional text."""
        frame, opening = PromptText.special, PromptText.special(self.opening)
        text = opening + frame(self.lead) + PromptText.plain(words) if words else opening
        if self.grammar.kind != "headed":
            return text + frame(self.separator if words else "") + self.grammar.write(calls) + frame(self.call_end)
        turns = text + frame(self.words_end) if words else PromptText()
        for call in calls:
            turns += opening + self.grammar.write([call]) + frame(self.call_end)
        return turns

    def reader(
        self, tools: Sequence[Mapping[str, Any]], controls: Collection[str] = (), shown: Collection[str] = ()
    ) -> ToolCallReader:
        """Return a parser for a message that may call these tools; see `ToolCallReader`."""
        functions = [function_of(tool) for tool in tools]
        schemas = {str(function.get("name")): function.get("parameters") or {} for function in functions}
        return ToolCallReader(self.grammar, schemas, controls, shown, self.opening)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool's description."""
    inside = tool.get("function")
    return inside if isinstance(inside, Mapping) else tool
