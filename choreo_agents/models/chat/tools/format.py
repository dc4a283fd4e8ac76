"""Calls and their results as turns of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from choreo_agents.models.chat.tools.grammar import ID, CallGrammar, ToolCall
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.chat.tools.reading import ToolCallReader
from choreo_agents.models.prompt_text import PromptText

TOOL = "\u241ftool\u241f"
"""Stands for the name of the tool in what a template writes."""
Tell = Callable[[Sequence[Mapping[str, Any]], str | None], PromptText | None]
"""What a template writes of tools, with instructions if there are any, before anything else; None: it raises."""


@dataclass(frozen=True)
class ResultFormat:
    """A turn with what a tool has returned: `TOOL` stands for its name, `ID` for the call's."""

    before: str
    after: str
    quotes: bool = False
    """Whether the words stand as a JSON string."""

    def around(self, words: str, tool: str, call: str) -> PromptText:
        """The whole turn."""
        said, names = PromptText.plain(to_json(words) if self.quotes else words), {TOOL: tool, ID: call}
        return PromptText.filled(self.before, names) + said + PromptText.filled(self.after, names)


@dataclass(frozen=True)
class ToolsFormat:
    """How a model is told of tools, calls them, and is told what they return."""

    grammar: CallGrammar
    opening: str
    """What a turn starts with that may call."""
    lead: str = ""
    """What stands between that and words."""
    separator: str = "\n"
    """What stands between words and calls."""
    words_end: str = ""
    """What closes a turn that calls nothing."""
    call_end: str = ""
    """What closes one that does."""
    result: ResultFormat | None = None
    """None: a user tells it."""
    tell: Tell | None = field(default=None, repr=False, compare=False)
    """None: instructions tell of tools, in our own words."""

    @property
    def is_headed(self) -> bool:
        """Whether the header of a turn says what it calls."""
        return self.grammar.kind == "headed"

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends a turn that calls by itself, in the place of what closes other turns."""
        return (self.call_end,) if self.call_end != self.words_end else ()

    def turn(self, words: str, calls: Sequence[ToolCall]) -> PromptText:
        """A turn that calls tools, of someone who may have said something before."""
        frame, opening = PromptText.special, PromptText.special(self.opening)
        said = opening + frame(self.lead) + PromptText.plain(words) if words else opening
        if self.grammar.kind != "headed":
            return said + frame(self.separator if words else "") + self.grammar.write(calls) + frame(self.call_end)
        made = said + frame(self.words_end) if words else PromptText()
        for call in calls:
            made += opening + self.grammar.write([call]) + frame(self.call_end)
        return made

    def reader(
        self, tools: Sequence[Mapping[str, Any]], controls: Collection[str] = (), shown: Collection[str] = ()
    ) -> ToolCallReader:
        """Reads a message of one who may call these tools; see `ToolCallReader`."""
        functions = [function_of(tool) for tool in tools]
        schemas = {str(each.get("name")): each.get("parameters") or {} for each in functions}
        return ToolCallReader(self.grammar, schemas, controls, shown, self.opening)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a tool's description says of the function."""
    inside = tool.get("function")
    return inside if isinstance(inside, Mapping) else tool
