"""Derives from a chat template how tools are described, called and answered.

Calls with placeholder names and arguments are rendered, alone and in pairs; what the template writes around the
placeholders is the grammar. Nothing depends on the model's family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.format import ChatFormat
from choreo_agents.models.chat.hiding import ControlEscaper
from choreo_agents.models.chat.tool_prompt import OWN_GRAMMAR
from choreo_agents.models.chat.tools.format import TOOL, ResultFormat, ToolsFormat
from choreo_agents.models.chat.tools.grammar import ID, CallGrammar, PairMarks, ToolCall
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from choreo_agents.models.chat.template import Template, Turn

_KEY, _VALUE, _COUNT, _OTHER_KEY = "choreo_key", "choreo value", 1717, "choreo_count"
_ARGUMENTS = {_KEY: _VALUE, _OTHER_KEY: _COUNT}
_NAMES = ("choreo_first", "choreo_second")
_IDS = ("choreoid1", "choreoid2")
"""Call ids of nine letters and digits, as some templates demand."""
_QUESTION = {"role": "user", "content": "\u241fquestion\u241f"}
_WORDS = "\u241fwords\u241f"
_RESULT = "\u241fresult\u241f"
_QUOTED = '\u241f"result"\u241f'
_IN_SYSTEM = {"tools_in_user_message": False}
"""A variable of templates that otherwise describe tools in the user's message."""
_MAY_OPEN = "<|python_tag|>"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAMES[0],
        "description": "It is described.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}},
    },
}


def tools_of(template: Template, chat: ChatFormat) -> ToolsFormat | None:
    """Derive how tools are described and called; None if the template does not describe tools.

    Args:
        template: The model's chat template.
        chat: The format of its turns.
    """
    telling = partial(_write_tools, template.with_options(**_IN_SYSTEM), chat)
    if (prompt := telling([_TOOL], None)) is None or _NAMES[0] not in prompt.text:
        return None
    calling = _CallAnalysis(template, chat)
    return replace(calling.format(), tell=telling)


def _write_tools(
    template: Template, chat: ChatFormat, tools: Sequence[Mapping[str, Any]], system: str | None
) -> PromptText | None:
    """Render the part of a template before the first question, which describes tools; see `Tell`."""
    escaper = ControlEscaper(template.tokenizer)
    mark = None if system is None else escaper.mark(system.strip() if chat.system.trims else system)
    turns: list[Turn] = [] if mark is None else [{"role": "system", "content": mark}]
    text = template.render([*turns, _QUESTION], tools=escaper.escape(list(tools)))
    before, question, _ = ("", "", "") if text is None else text.partition(_QUESTION["content"])
    if not question or (mark is not None and mark not in before):
        return None
    return escaper.restore(_strip_root(template, chat.bos, before.removesuffix(chat.user.plain)))


def _strip_root(template: Template, root: str, text: str) -> str:
    """Remove from the start of a conversation what every conversation starts with."""
    common = template.common_start(root, text)
    if common == root:
        return text.removeprefix(root)
    # With tools, the first turn differs: the agent's own text follows that turn.
    end = template.pieces(root)[-1]
    return text[len(common) :].partition(end)[2] or text


class _CallAnalysis:
    """Derivation of the calls and results of one template."""

    def __init__(self, template: Template, chat: ChatFormat) -> None:
        self._template = template
        self._chat = chat
        self._as_text = False
        """Whether the template takes arguments as JSON text only."""
        rendered = self._render_calls([self._call(0)])
        if rendered is None:
            self._as_text = True
            rendered = self._render_calls([self._call(0)])
        self._single = rendered

    def format(self) -> ToolsFormat:
        """Return the format of tools."""
        chat = self._chat
        end = chat.assistant.after
        usual = ToolsFormat(OWN_GRAMMAR, chat.assistant.plain, words_end=end, call_end=end, result=self._result())
        if self._single is None:
            return usual
        shape = self._find_grammar(self._single)
        if shape is None:
            return usual
        grammar, head, tail = shape
        head, behind, result = self._read_results(head, tail)
        opening = self._template.common_start(head, chat.assistant.plain)
        if opening != chat.assistant.plain.rstrip(" ") and len(opening.strip()) < len(chat.assistant.plain.strip()):
            content = self._template.pieces(chat.assistant.plain.rstrip())[-1]
            if content.strip() and content in grammar.before_arguments:
                grammar = replace(grammar, kind="headed", content=content, unspoken=self._thoughts(opening, content))
        opening = chat.assistant.plain if head.startswith(chat.assistant.plain) else opening
        after, call_end = self._split_end(behind)
        grammar = self._add_between(replace(grammar, before=head.removeprefix(opening), after=after), opening, call_end)
        return ToolsFormat(
            grammar,
            opening,
            lead=chat.assistant.plain.removeprefix(opening),
            separator=self._find_separator(opening, grammar),
            words_end=end,
            call_end=call_end,
            result=result,
        )

    def _call(self, number: int, arguments: Mapping[str, Any] = _ARGUMENTS) -> dict[str, Any]:
        encoded: Any = json.dumps(arguments) if self._as_text else dict(arguments)
        function = {"name": _NAMES[number], "arguments": encoded}
        return {"id": _IDS[number], "type": "function", "function": function}

    def _render_calls(self, calls: Sequence[Any], *results: str, words: str = "") -> str | None:
        """Render an answer with calls, without the question before it; None if the template writes no calls."""
        turns: list[Turn] = [_QUESTION, {"role": "assistant", "content": words, "tool_calls": [*calls]}]
        for call, result in zip(calls, results, strict=False):
            name = call["function"]["name"]
            turns.append({"role": "tool", "content": result, "tool_call_id": call["id"], "name": name})
        text = self._template.render(turns)
        behind = "" if text is None else text.partition(_QUESTION["content"])[2].removeprefix(self._chat.user.after)
        return behind if all(behind.count(call["function"]["name"]) for call in calls) and behind else None

    def _find_grammar(self, text: str) -> tuple[CallGrammar, str, str] | None:
        """Return a grammar that may have written a rendered call, with the text before and after it; None: none has."""
        at = text.index(_NAMES[0])
        behind = at + len(_NAMES[0])
        for start, value, end in _find_objects(text):
            if start < at < end and (grammar := _find_object(text[start:end], value)) is not None:
                return grammar, text[:start], text[end:]
        for start, value, end in _find_objects(text[behind:]):
            if value == _ARGUMENTS:
                named = CallGrammar("named", "", "", "", before_arguments=text[behind : behind + start])
                return named, text[:at], text[behind + end :]
        # All values have the same mark before them: others, as Python's texts in quotes, are not read.
        pairs = re.match(rf"(.*?){_KEY}(.*?){_VALUE}(.*?){_OTHER_KEY}\2(?:{_COUNT})", text[behind:], re.DOTALL)
        if pairs is None:
            return None
        empty = self._render_calls([self._call(0, {})])
        last = text[behind + pairs.end() :]
        marks = PairMarks(pairs[1], pairs[2], pairs[3], last, last if empty is None else empty.partition(_NAMES[0])[2])
        return CallGrammar("pairs", "", "", "", pairs=marks), text[:at], last.removeprefix(marks.value_end)

    def _read_results(self, head: str, tail: str) -> tuple[str, str, ResultFormat | None]:
        """Return the text before and after a call that belongs to the call, and the format of results."""
        text = self._render_calls([self._call(0)], _RESULT)
        if text is None or text.count(_RESULT) != 1:
            return head, tail, None
        before, _, after = text.partition(_RESULT)
        shape = self._find_grammar(before)
        if shape is None:
            return head, tail, None
        # At the end of a conversation, a call may be opened and closed otherwise.
        _, head, between = shape
        own = between.startswith(tail) and bool(between.removeprefix(tail).strip())
        opening = (
            between.removeprefix(tail) if own else between.removeprefix(self._template.common_start(between, tail))
        )
        tail = between.removesuffix(opening)
        quoted = self._render_calls([self._call(0)], _QUOTED)
        quotes = quoted is not None and _QUOTED not in quoted and json.dumps(_QUOTED, ensure_ascii=False) in quoted
        if quotes:
            opening, after = opening.removesuffix('"'), after.removeprefix('"')
        return head, tail, ResultFormat(_to_marks(opening), _to_marks(after), quotes)

    def _result(self) -> ResultFormat | None:
        """Return the format of results of a template that writes no calls; None if it has none."""
        turns: list[Turn] = [
            _QUESTION,
            {"role": "assistant", "content": _WORDS},
            {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]},
        ]
        text = self._template.render(turns)
        if text is None or text.count(_RESULT) != 1 or _WORDS not in text:
            return None
        before, _, after = text.partition(_WORDS)[2].partition(_RESULT)
        return ResultFormat(_to_marks(before.removeprefix(self._chat.assistant.after)), _to_marks(after))

    def _split_end(self, tail: str) -> tuple[str, str]:
        """Split the text after a call into what closes the calls and what closes their turn."""
        end = self._chat.assistant.after
        if tail.endswith(end):
            return tail.removesuffix(end), end
        pieces = self._template.pieces(tail)
        controls = self._template.tokenizer.added_tokens_encoder
        last = max((at for at, piece in enumerate(pieces) if piece in controls), default=len(pieces))
        return "".join(pieces[:last]), "".join(pieces[last:])

    def _add_between(self, grammar: CallGrammar, opening: str, call_end: str) -> CallGrammar:
        """Return a grammar completed with the text between two calls."""
        two = self._render_calls([self._call(0), self._call(1)])
        marks = grammar.pairs
        if marks is not None:
            last = marks.last.removesuffix(call_end)
            marks = replace(marks, last=last, empty=marks.empty.removesuffix(call_end))
            grammar = replace(grammar, pairs=marks, after=last.removeprefix(marks.value_end))
        first, second = (grammar.write_core(_probe_call(number)).text for number in (0, 1))
        behind = "" if two is None else two.partition(first)[2]
        between, second_start, _ = behind.partition(second[: second.index(_NAMES[1]) + len(_NAMES[1])])
        controls = self._template.tokenizer.added_tokens_encoder
        if grammar.is_bare and _MAY_OPEN in controls:
            grammar = replace(grammar, may_open=(_MAY_OPEN,))
        if not second_start:
            between = "; " if grammar.is_bare else f"{grammar.closing}{call_end}{opening}{grammar.before}"
        return replace(grammar, between=between)

    def _find_separator(self, opening: str, grammar: CallGrammar) -> str:
        """Return the text between an answer's text and its calls."""
        text = self._render_calls([self._call(0)], words=_WORDS)
        if text is None or _WORDS not in text:
            return ""
        between = text.partition(_WORDS)[2].partition(_NAMES[0])[0]
        start = grammar.write([_probe_call(0)]).text.partition(_NAMES[0])[0]
        return between.removesuffix(start) if between.endswith(start) else "\n"

    def _thoughts(self, opening: str, content: str) -> str:
        """Return what marks a header as that of thoughts, in formats whose headers name the kind of a turn."""
        thoughts = self._chat.thoughts
        return "" if thoughts is None else thoughts.header.removeprefix(opening).removesuffix(content)


def _probe_call(number: int) -> ToolCall:
    return ToolCall(_NAMES[number], _ARGUMENTS, _IDS[number])


def _to_marks(text: str) -> str:
    return text.replace(_NAMES[0], TOOL).replace(_IDS[0], ID)


def _find_object(written: str, call: Any) -> CallGrammar | None:
    """Return the grammar of a call that is one JSON object; None if it is no call."""
    inside = call.get("function") if isinstance(call.get("function"), dict) else call
    name_key = next((key for key, value in inside.items() if value == _NAMES[0]), None)
    args_key = next((key for key, value in inside.items() if value in (_ARGUMENTS, json.dumps(_ARGUMENTS))), None)
    opening, _, tail = written.partition(_NAMES[0])
    place = next(((start, end) for start, value, end in _find_objects(tail) if value == _ARGUMENTS), None)
    if name_key is None or args_key is None or place is None:
        return None
    before, middle, end = (part.replace(_IDS[0], ID) for part in (opening, tail[: place[0]], tail[place[1] :]))
    return CallGrammar("object", "", "", "", before, middle, end, name_key, args_key)


def _find_objects(text: str) -> Iterator[tuple[int, Any, int]]:
    """Yield the JSON objects of a text, nested ones too: start, value and end of each."""
    for brace in re.finditer(r"\{", text):
        with suppress(ValueError):
            yield brace.start(), *json.JSONDecoder().raw_decode(text, brace.start())
