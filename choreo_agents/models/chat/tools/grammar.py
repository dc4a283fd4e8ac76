"""Data types of tool calls, and the grammar by which a family of models writes them.

    before | core | between | core | after          core    before_name | name | before_arguments | arguments | end

`arguments` are JSON, or pairs of a key and a value between marks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.prompt_text import PromptText

Kind = Literal["object", "named", "headed", "pairs"]
"""One JSON object with name and arguments; a name followed by JSON; the same, with the name in the header of the turn;
a name followed by pairs."""

ID = "\u241fid\u241f"
"""Placeholder of a call's id in rendered templates."""


@dataclass(frozen=True)
class ToolCall:
    """A valid call of a tool."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values by parameter."""
    id: str = ""
    """Id that its result refers to; parsers leave it empty."""


@dataclass(frozen=True)
class BrokenCall:
    """A call that cannot be parsed."""

    name: str | None
    """Name of the tool, as far as it was written."""
    text: str
    """All text of the call."""
    why: str


class TextPart(NamedTuple):
    """A piece of streamed text."""

    text: str


class CallPart(NamedTuple):
    """A complete call, valid or broken."""

    number: int
    """Index among the message's calls."""
    name: str | None
    arguments: str
    """Arguments as JSON; of a broken call, all its text."""


@dataclass(frozen=True)
class PairMarks:
    """The marks around keys and values."""

    first: str
    """Before the first key."""
    inner: str
    """Between a key and its value."""
    next: str
    """Between a value and the next key."""
    last: str
    """After the last value."""
    empty: str
    """After the name of a call without arguments."""

    @property
    def value_end(self) -> str:
        """The mark that closes a value."""
        return self.next.strip().removesuffix(self.first.strip()).rstrip()


@dataclass(frozen=True)
class CallGrammar:
    """The format of a family's calls, with texts as in the module's drawing and `ID` for a call's id."""

    kind: Kind
    before: str
    between: str
    after: str
    before_name: str = ""
    before_arguments: str = ""
    end: str = ""
    name_key: str = "name"
    """Key of the tool's name in a JSON object."""
    arguments_key: str = "arguments"
    pairs: PairMarks | None = None
    may_open: tuple[str, ...] = ()
    """Control tokens that may precede calls that need no opening mark."""
    content: str = ""
    """For calls in headers: the mark before the text of a turn, or the arguments of a call."""
    unspoken: str = ""
    """For calls in headers: the mark of a turn of thoughts."""

    @property
    def is_bare(self) -> bool:
        """True if calls have no opening mark, so that only their content distinguishes them from text."""
        return self.kind == "object" and not self.before.strip().strip("[")

    @property
    def closing(self) -> str:
        """Text after the last call. The mark after the last pair closes a call, too."""
        return "" if self.pairs is not None else self.after

    @property
    def repeats(self) -> bool:
        """True if each call has opening and closing marks of its own."""
        return self.between.strip().startswith(self.after.strip()) and self.between.strip().endswith(
            self.before.strip()
        )

    def write(self, calls: Sequence[ToolCall]) -> PromptText:
        """Write calls as the model does."""
        text = PromptText()
        for number, call in enumerate(calls):
            text += PromptText.special(self.between if number else self.before) + self.write_core(call)
        return text + PromptText.special(self.closing)

    def write_core(self, call: ToolCall) -> PromptText:
        """Write a call without the marks around it."""
        words = PromptText.plain
        if self.pairs is not None:
            return words(call.name) + self._write_pairs(call.arguments, self.pairs)
        name = to_json(call.name)[1:-1] if self.kind == "object" else call.name
        before, middle, end = (
            PromptText.special(text.replace(ID, call.id))
            for text in (self.before_name, self.before_arguments, self.end)
        )
        return before + words(name) + middle + words(to_json(call.arguments)) + end

    def _write_pairs(self, arguments: Mapping[str, Any], marks: PairMarks) -> PromptText:
        frame, words = PromptText.special, PromptText.plain
        if not arguments:
            return frame(marks.empty)
        text = PromptText()
        for number, (key, value) in enumerate(arguments.items()):
            text += frame(marks.next if number else marks.first) + words(key) + frame(marks.inner)
            text += words(value if isinstance(value, str) else to_json(value))
        return text + frame(marks.last)

    def mapped(self, change: Callable[[str], str]) -> CallGrammar:
        """Return a copy with all texts changed by a function."""
        texts = ("before", "between", "after", "before_name", "before_arguments", "end", "content", "unspoken")
        changes: dict[str, Any] = {text: change(getattr(self, text)) for text in texts}
        marks = self.pairs
        if marks is not None:
            pairs = {name: change(getattr(marks, name)) for name in ("first", "inner", "next", "last", "empty")}
            changes["pairs"] = replace(marks, **pairs)
        return replace(self, may_open=tuple(map(change, self.may_open)), **changes)
