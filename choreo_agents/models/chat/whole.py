"""A conversation as a chat template writes it at once, in which what anybody said is words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.hiding import Hiding
from choreo_agents.models.chat.thinking import FIELDS, SPOKEN, switched
from choreo_agents.models.chat.tools.format import TOOL, ResultFormat
from choreo_agents.models.chat.tools.grammar import ID
from choreo_agents.models.chat.tools.literals import to_json
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from choreo_agents.models.chat.template import Template, Turn

_NO_EFFORT = "\u241feffort\u241f"
"""An effort that no template knows."""


class WholeConversation:
    """Writes conversations whose last turn is the model's to say.

    Args:
        template: Of the model.
        usual: Whether it lets the model think if nothing is said about it.
        result: How it writes what a tool has returned, if it has a form for that.
    """

    def __init__(self, template: Template, *, usual: bool, result: ResultFormat | None) -> None:
        self._template, self._usual, self._result = template, usual, result
        self._switch, self._thinks, self._answers = switched(template)

    def __call__(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        header: PromptText,
        *,
        thinks: bool,
        effort: str | None = None,
    ) -> PromptText | None:
        """A whole prompt; None if the template refuses the conversation, or leaves out anything that is said in it.

        An effort that changes nothing of it is left out, too.

        Args:
            turns: Role, content and what else templates look at: `tool_calls`, `tool_call_id`, `name`, and an
                assistant's `reasoning_content`.
            tools: Descriptions of those that may be called.
            header: What the answer starts with: as much of it as the template has not written stands at the end.
            thinks: Whether the model is to think before it answers.
            effort: The template's `reasoning_effort`; None: as it has it.
        """
        hiding = Hiding(self._template.tokenizer)
        template, said = self._template, [hiding.hidden(_thought(turn)) for turn in turns]
        shown = said
        if thinks != self._usual and self._switch in SPOKEN:
            shown = _told(shown, SPOKEN[0] if thinks else SPOKEN[1])
        elif thinks != self._usual:
            template = (self._thinks if thinks else self._answers) or template
        asked: dict[str, Any] = {"answer": True, "tools": hiding.hidden([*tools]) or None}
        if effort is not None:
            template, other = (template.with_options(reasoning_effort=each) for each in (effort, _NO_EFFORT))
            if template.render(shown, **asked) == other.render(shown, **asked):
                return None
        text = template.render(shown, **asked)
        if text is None or not _says_all(text, [turn["content"] for turn in said]):
            return None
        skeleton = _Skeleton(shown)
        if not skeleton.is_whole(template.render(skeleton.turns, **asked), self._result):
            return None
        return _opened(hiding.shown(text), header)


class _Skeleton:
    """A conversation that goes like another, of marks: which of these a template leaves out tells what it leaves out.

    The words themselves would also be found where others say the same.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._marks: list[str] = []
        self._results: list[tuple[str, str, str]] = []
        """The tool, the call's id and the words of each result."""
        self._called: dict[str, str] = {}
        self.turns = [self._turn(turn) for turn in turns]

    def is_whole(self, text: str | None, result: ResultFormat | None) -> bool:
        """Whether all of it is in this text, and each result told as the result of its own tool."""
        if text is None or not _says_all(text, self._marks):
            return False
        _, names, behind = ("", "", "") if result is None else result.before.rpartition(TOOL)
        quote = '"' if result is not None and result.quotes else ""
        told = (f"{tool}{behind.replace(ID, call)}{quote}{words}" for tool, call, words in self._results)
        return not names or _says_all(text, told)

    def _mark(self, what: str) -> str:
        self._marks.append(f"choreo{what}{len(self._marks)}x")
        return self._marks[-1]

    def _turn(self, turn: Turn) -> Turn:
        made = turn | {"content": self._mark("words") if turn["content"].strip() else turn["content"]}
        if turn.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
        if turn["role"] == "tool":
            called = turn.get("tool_call_id", "")
            made["name"] = self._called.get(called, turn.get("name", ""))
            self._results += [(made["name"], called, made["content"])] if turn["content"].strip() else []
        return made

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name = self._called[call["id"]] = self._mark("tool")
        return {**call, "function": {"name": name, "arguments": {self._mark("key"): self._mark("value")}}}


def _says_all(text: str, said: Iterable[str]) -> bool:
    """Whether words stand in a text: as they are, as a JSON string, or without what templates take for a switch."""
    at = 0  # most stand in the order in which they were said: what is long is not searched again and again
    for words in map(str.strip, said):
        forms = dict.fromkeys((words, to_json(words)[1:-1]))
        found = next((place for form in forms if (place := text.find(form, at)) >= 0), -1)
        if found < 0 and not any(form in text for form in forms):
            parts = [part.strip() for part in re.split("|".join(map(re.escape, SPOKEN)), words)]
            if len(parts) == 1 or not _says_all(text, parts):
                return False
        at = max(at, found)
    return True


def _thought(turn: Turn) -> Turn:
    """A turn whose thoughts stand wherever some template looks for them."""
    thoughts = turn.get(FIELDS[0])
    return turn | dict.fromkeys(FIELDS, thoughts) if thoughts else turn


def _told(turns: Sequence[Turn], words: str) -> list[Turn]:
    """A conversation whose instructions also say these words."""
    first = next(iter(turns), None)
    if first is None or first["role"] != "system":
        return [{"role": "system", "content": words}, *turns]
    return [first | {"content": f"{first['content']}\n\n{words}"}, *turns[1:]]


def _opened(prompt: PromptText, header: PromptText) -> PromptText:
    """A prompt that ends with a header, of which its end may be the beginning.

    A blank at the end is left to the first word, as in turns.
    """
    asked, wanted = prompt.rstrip(" "), header.text
    written = asked.text
    begun = next(n for n in range(len(wanted), -1, -1) if written.endswith(wanted[:n]))
    return asked + header.removeprefix(wanted[:begun])
