"""What a model says that may call tools, and how one family of models writes calls.

    before | core | between | core | after          core    before_name | name | before_arguments | arguments | end

`arguments` are JSON, Python's keyword arguments, or pairs of a key and a value, each between marks of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from choreo_agents.models.chat.tools.literals import to_json, to_python
from choreo_agents.models.prompt_text import PromptText

Kind = Literal["object", "named", "headed", "python", "pairs"]
"""One JSON object with name and arguments; a name, and JSON behind it; the same, where the name stands in the header of
a turn; a call as Python writes it; a name, and pairs."""

ID = "\u241fid\u241f"
"""Stands for a call's id in what a template writes."""


@dataclass(frozen=True)
class ToolCall:
    """A call that can be made."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON-plain, by parameter."""
    id: str = ""
    """By which its result names it; a reader gives none."""


@dataclass(frozen=True)
class BrokenCall:
    """Something that was to be a call, and cannot be read as one."""

    name: str | None
    """The tool's, as far as it was said."""
    text: str
    """All that was written of it."""
    why: str


class TextPart(NamedTuple):
    """TextPart as they come."""

    text: str


class CallPart(NamedTuple):
    """A call, once it is known to be one, or to be none."""

    number: int
    """Which of the message's calls."""
    name: str | None
    arguments: str
    """As JSON; of what is no call, all that was written of it."""


@dataclass(frozen=True)
class PairMarks:
    """What stands around keys and values."""

    first: str
    """Before the first key."""
    inner: str
    """Between a key and its value."""
    next: str
    """Between a value and the next key."""
    last: str
    """Behind the last value."""
    empty: str
    """Behind the name of a call without arguments."""

    @property
    def value_end(self) -> str:
        """What closes a value."""
        return self.next.strip().removesuffix(self.first.strip()).rstrip()


@dataclass(frozen=True)
class CallGrammar:
    """See above; all texts as the template writes them, `ID` in the place of a call's id."""

    kind: Kind
    before: str
    between: str
    after: str
    before_name: str = ""
    before_arguments: str = ""
    end: str = ""
    name_key: str = "name"
    """Of a JSON object."""
    arguments_key: str = "arguments"
    pairs: PairMarks | None = None
    may_open: tuple[str, ...] = ()
    """Control tokens that may stand before calls which nothing has to stand before."""
    content: str = ""
    """Of calls in headers: what the words of a turn, and the arguments of a call, stand right behind."""
    unspoken: str = ""
    """Of these also: what tells that a turn is thought, and not said."""

    @property
    def is_bare(self) -> bool:
        """Whether nothing tells a call from words but what it says."""
        return self.kind in ("object", "python") and not self.before.strip().strip("[")

    @property
    def repeats(self) -> bool:
        """Whether each call has all that stands around calls for itself."""
        return self.between.strip().startswith(self.after.strip()) and self.between.strip().endswith(
            self.before.strip()
        )

    def write(self, calls: Sequence[ToolCall]) -> PromptText:
        """Calls as the model writes them."""
        text = PromptText()
        for number, call in enumerate(calls):
            filled = self._with_id(call.id)
            text += PromptText.special(filled.between if number else filled.before)
            text += filled._core(call)
        last = self._with_id(calls[-1].id if calls else "")
        # What closes a pair is what closes the call.
        return text + (PromptText() if self.pairs is not None else PromptText.special(last.after))

    def _with_id(self, name: str) -> CallGrammar:
        return self.mapped(lambda text: text.replace(ID, name))

    def _core(self, call: ToolCall) -> PromptText:
        frame, words = PromptText.special, PromptText.plain
        if self.kind == "python":
            given = ", ".join(f"{key}={to_python(value)}" for key, value in call.arguments.items())
            return words(f"{call.name}({given})")
        if self.pairs is not None:
            return words(call.name) + self._paired(call.arguments, self.pairs)
        name = to_json(call.name)[1:-1] if self.kind == "object" else call.name
        named = frame(self.before_name) + words(name) + frame(self.before_arguments)
        return named + words(to_json(call.arguments)) + frame(self.end)

    def _paired(self, arguments: Mapping[str, Any], marks: PairMarks) -> PromptText:
        frame, words = PromptText.special, PromptText.plain
        if not arguments:
            return frame(marks.empty)
        text = PromptText()
        for number, (key, value) in enumerate(arguments.items()):
            text += frame(marks.next if number else marks.first) + words(key) + frame(marks.inner)
            text += words(value if isinstance(value, str) else to_json(value))
        return text + frame(marks.last)

    def mapped(self, change: Callable[[str], str]) -> CallGrammar:
        """The same with other texts."""
        texts = ("before", "between", "after", "before_name", "before_arguments", "end", "content", "unspoken")
        changes: dict[str, Any] = {text: change(getattr(self, text)) for text in texts}
        marks = self.pairs
        if marks is not None:
            pairs = {name: change(getattr(marks, name)) for name in ("first", "inner", "next", "last", "empty")}
            changes["pairs"] = replace(marks, **pairs)
        return replace(self, may_open=tuple(map(change, self.may_open)), **changes)
