"""Renders a whole conversation with the chat template, with all messages as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.template import ControlEscaper
from choreo_agents.models.chat.thinking import FIELDS, SPOKEN, find_switch
from choreo_agents.models.chat.tools.format import TOOL, ResultFormat
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from choreo_agents.models.chat.template import Template, Turn

_NO_EFFORT = "\u241feffort\u241f"
"""A reasoning effort that no template knows."""


class WholeConversation:
    """A renderer of conversations that the model is to answer.

    Args:
        template: The model's chat template.
        usual: Whether the model thinks by default.
        result: Format of tool results, if the template has one.
    """

    def __init__(self, template: Template, *, usual: bool, result: ResultFormat | None) -> None:
        self._template, self._usual, self._result = template, usual, result
        self._switch, self._thinks, self._answers = find_switch(template)

    def __call__(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        header: PromptText,
        *,
        thinks: bool,
        effort: str | None = None,
    ) -> PromptText | None:
        """Render a prompt; None if the template raises, omits any message, or ignores the effort.

        Args:
            turns: Messages with role, content and the other fields that templates read: `tool_calls`,
                `tool_call_id`, `name`, and an assistant's `reasoning_content`.
            tools: Descriptions of the tools that may be called.
            header: The header of the answer; what the template has not written of it is appended.
            thinks: Whether the model is to think before it answers.
            effort: The template's `reasoning_effort`; None: its default.
        """
        escaper = ControlEscaper(self._template.tokenizer)
        template, escaped = self._template, [escaper.escape(_copy_thoughts(turn)) for turn in turns]
        shown = escaped
        if thinks != self._usual and self._switch in SPOKEN:
            shown = _add_instruction(shown, SPOKEN[0] if thinks else SPOKEN[1])
        elif thinks != self._usual:
            template = (self._thinks if thinks else self._answers) or template
        options: dict[str, Any] = {"answer": True, "tools": escaper.escape([*tools]) or None}
        if effort is not None:
            template, reference = (template.with_options(reasoning_effort=level) for level in (effort, _NO_EFFORT))
            if template.render(shown, **options) == reference.render(shown, **options):
                return None
        text = template.render(shown, **options)
        if text is None or not _contains_all(text, [turn["content"] for turn in escaped]):
            return None
        skeleton = _Skeleton(shown)
        if not skeleton.is_whole(template.render(skeleton.turns, **options), self._result):
            return None
        return _append_header(escaper.restore(text), header)


class _Skeleton:
    """A copy of a conversation with unique placeholders, to find which messages a template omits.

    The messages themselves do not show it: two may contain the same text.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._marks: list[str] = []
        self._results: list[tuple[str, str, str]] = []
        """The tool, the call's id and the placeholder of each result."""
        self._names: dict[str, str] = {}
        self.turns = [self._turn(turn) for turn in turns]

    def is_whole(self, text: str | None, result: ResultFormat | None) -> bool:
        """Return whether a rendered text has all placeholders, each result with the name of its own tool."""
        if text is None or not _contains_all(text, self._marks):
            return False
        _, names, behind = ("", "", "") if result is None else result.before.rpartition(TOOL)
        quote = '"' if result is not None and result.quotes else ""
        results = (f"{tool}{behind.replace(ID, call)}{quote}{words}" for tool, call, words in self._results)
        return not names or _contains_all(text, results)

    def _mark(self, kind: str) -> str:
        self._marks.append(f"choreo{kind}{len(self._marks)}x")
        return self._marks[-1]

    def _turn(self, turn: Turn) -> Turn:
        marked = turn | {"content": self._mark("words") if turn["content"].strip() else turn["content"]}
        if turn.get("tool_calls"):
            marked["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
        if turn["role"] == "tool":
            called = turn.get("tool_call_id", "")
            marked["name"] = self._names.get(called, turn.get("name", ""))
            self._results += [(marked["name"], called, marked["content"])] if turn["content"].strip() else []
        return marked

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name = self._names[call["id"]] = self._mark("tool")
        return {**call, "function": {"name": name, "arguments": {self._mark("key"): self._mark("value")}}}


def _contains_all(text: str, texts: Iterable[str]) -> bool:
    """Return whether a text contains others: verbatim, as JSON strings, or without the words that switch thinking."""
    at = 0  # most occur in order: searching on from the last one keeps this linear
    for words in map(str.strip, texts):
        forms = dict.fromkeys((words, to_json(words)[1:-1]))
        start = next((place for form in forms if (place := text.find(form, at)) >= 0), -1)
        if start < 0 and not any(form in text for form in forms):
            parts = [part.strip() for part in re.split("|".join(map(re.escape, SPOKEN)), words)]
            if len(parts) == 1 or not _contains_all(text, parts):
                return False
        at = max(at, start)
    return True


def _copy_thoughts(turn: Turn) -> Turn:
    """Return a turn with its thoughts in every field that templates read."""
    thoughts = turn.get(FIELDS[0])
    return turn | dict.fromkeys(FIELDS, thoughts) if thoughts else turn


def _add_instruction(turns: Sequence[Turn], words: str) -> list[Turn]:
    """Append a text to the instructions of a conversation."""
    first = next(iter(turns), None)
    if first is None or first["role"] != "system":
        return [{"role": "system", "content": words}, *turns]
    return [first | {"content": f"{first['content']}\n\n{words}"}, *turns[1:]]


def _append_header(prompt: PromptText, header: PromptText) -> PromptText:
    """Append a header to a prompt that may already end with the start of it.

    A trailing space is left to the first word, as in turns.
    """
    stripped, expected = prompt.rstrip(" "), header.text
    written = stripped.text
    overlap = next(n for n in range(len(expected), -1, -1) if written.endswith(expected[:n]))
    return stripped + header.removeprefix(expected[:overlap])
