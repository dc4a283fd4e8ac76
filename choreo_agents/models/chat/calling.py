"""How a model is told of tools and calls them, as its chat template writes it.

A call of marks is rendered, alone and with others, and what the template writes around the marks is the grammar. Which
family it is nobody asks: a JSON object is one wherever it stands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.format import ChatFormat
from choreo_agents.models.chat.hiding import Hiding
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
"""Nine letters and digits: what some templates insist on."""
_QUESTION = {"role": "user", "content": "\u241fquestion\u241f"}
_WORDS = "\u241fwords\u241f"
_RESULT = "\u241fresult\u241f"
_QUOTED = '\u241f"result"\u241f'
_IN_SYSTEM = {"tools_in_user_message": False}
"""A variable of templates that otherwise tell of tools in a person's words."""
_MAY_OPEN = "<|python_tag|>"
_MARKS = (
    ("<tool_call>", "</tool_call>", OWN_GRAMMAR),
    (
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        CallGrammar("python", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    ),
)
"""How calls are written between marks that a template has and never writes itself."""
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAMES[0],
        "description": "It is described.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}},
    },
}


def tools_of(template: Template, chat: ChatFormat) -> ToolsFormat | None:
    """How a model is told of tools and calls them; None if its template does not tell of them.

    Args:
        template: Of the model.
        chat: Its turns.
    """
    telling = _Telling(template.with_options(**_IN_SYSTEM), chat)
    if (told := telling([_TOOL], None)) is None or _NAMES[0] not in told.text:
        return None
    calling = _Calling(template, chat)
    return replace(calling.format(), tell=telling)


class _Telling:
    """What a template writes of tools before the first question."""

    def __init__(self, template: Template, chat: ChatFormat) -> None:
        self._template = template
        self._chat = chat

    def __call__(self, tools: Sequence[Mapping[str, Any]], system: str | None) -> PromptText | None:
        """See `Tell`."""
        hiding = Hiding(self._template.tokenizer)
        mark = None if system is None else hiding.mark(self._said(system))
        turns: list[Turn] = [] if mark is None else [{"role": "system", "content": mark}]
        text = self._template.render([*turns, _QUESTION], tools=hiding.hidden(list(tools)))
        before, found, _ = ("", "", "") if text is None else text.partition(_QUESTION["content"])
        if not found or (mark is not None and mark not in before):
            return None
        return hiding.shown(self._behind_root(before.removesuffix(self._chat.user.plain)))

    def _said(self, system: str) -> str:
        return system.strip() if self._chat.system.trims else system

    def _behind_root(self, text: str) -> str:
        """A conversation's start without what every conversation starts with."""
        root = self._chat.bos
        common = self._template.common_start(root, text)
        if common == root:
            return text.removeprefix(root)
        # With tools it starts otherwise: what comes behind the turn that does is the agent's own.
        end = self._template.pieces(root)[-1]
        return text[len(common) :].partition(end)[2] or text


class _Calling:
    """One template's calls and results."""

    def __init__(self, template: Template, chat: ChatFormat) -> None:
        self._template = template
        self._chat = chat
        self._as_text = False
        """Whether it takes arguments as text only."""
        one = self._behind_question([self._call(0)])
        if one is None:
            self._as_text = True
            one = self._behind_question([self._call(0)])
        self._one = one

    def format(self) -> ToolsFormat:
        """All of it."""
        chat = self._chat
        end = chat.assistant.after
        usual = ToolsFormat(self._marked(), chat.assistant.plain, words_end=end, call_end=end, result=self._alone())
        if self._one is None:
            return usual
        shape = next(self._shapes(self._one), None)
        if shape is None:
            return usual
        grammar, head, tail = shape
        head, behind, result = self._results(head, tail)
        opening = self._template.common_start(head, chat.assistant.plain)
        if opening != chat.assistant.plain.rstrip(" ") and len(opening.strip()) < len(chat.assistant.plain.strip()):
            content = self._template.pieces(chat.assistant.plain.rstrip())[-1]
            if content.strip() and content in grammar.before_arguments:
                grammar = replace(grammar, kind="headed", content=content, unspoken=self._unspoken(opening, content))
        opening = chat.assistant.plain if head.startswith(chat.assistant.plain) else opening
        after, call_end = self._closed(behind)
        grammar = self._with_more(replace(grammar, before=head.removeprefix(opening), after=after), opening, call_end)
        return ToolsFormat(
            grammar,
            opening,
            lead=chat.assistant.plain.removeprefix(opening),
            separator=self._joint(opening, grammar),
            words_end=end,
            call_end=call_end,
            result=result,
        )

    def _call(self, number: int, arguments: Mapping[str, Any] = _ARGUMENTS) -> dict[str, Any]:
        given: Any = json.dumps(arguments) if self._as_text else dict(arguments)
        function = {"name": _NAMES[number], "arguments": given}
        return {"id": _IDS[number], "type": "function", "function": function}

    def _behind_question(self, calls: Sequence[Any], *results: str, words: str = "") -> str | None:
        """What stands behind a question that calls answer; None if the template does not write them."""
        turns: list[Turn] = [_QUESTION, {"role": "assistant", "content": words, "tool_calls": [*calls]}]
        for call, result in zip(calls, results, strict=False):
            name = call["function"]["name"]
            turns.append({"role": "tool", "content": result, "tool_call_id": call["id"], "name": name})
        text = self._template.render(turns)
        behind = "" if text is None else text.partition(_QUESTION["content"])[2].removeprefix(self._chat.user.after)
        return behind if all(behind.count(call["function"]["name"]) for call in calls) and behind else None

    def _shapes(self, text: str) -> Iterator[tuple[CallGrammar, str, str]]:
        """The grammars that a call may have been written in, and what stands before and behind it."""
        at = text.index(_NAMES[0])
        behind = at + len(_NAMES[0])
        for start, said, end in _objects(text):
            if start < at < end:
                yield from self._object(text, start, said, end)
        for start, said, end in _objects(text[behind:]):
            if said == _ARGUMENTS:
                named = CallGrammar("named", "", "", "", before_arguments=text[behind : behind + start])
                yield named, text[:at], text[behind + end :]
                return
        python = re.match(rf"\(\s*{_KEY}\s*=\s*(['\"]){_VALUE}\1\s*,\s*{_OTHER_KEY}\s*=\s*{_COUNT}\s*\)", text[behind:])
        if python is not None:
            yield CallGrammar("python", "", "", ""), text[:at], text[behind + python.end() :]
            return
        pairs = re.match(rf"(.*?){_KEY}(.*?){_VALUE}(.*?){_OTHER_KEY}(.*?){_COUNT}", text[behind:], re.DOTALL)
        if pairs is not None:
            empty = self._behind_question([self._call(0, {})])
            last = text[behind + pairs.end() :]
            tail = last if empty is None else empty.partition(_NAMES[0])[2]
            marks = PairMarks(pairs[1], pairs[2], pairs[3], last, tail)
            value_end = marks.value_end
            yield CallGrammar("pairs", "", "", "", pairs=marks), text[:at], last.removeprefix(value_end)

    def _object(self, text: str, start: int, said: Any, end: int) -> Iterator[tuple[CallGrammar, str, str]]:
        inside = said.get("function") if isinstance(said.get("function"), dict) else said
        name = next((key for key, value in inside.items() if value == _NAMES[0]), None)
        given = next((key for key, value in inside.items() if value in (_ARGUMENTS, json.dumps(_ARGUMENTS))), None)
        if name is None or given is None:
            return
        written = text[start:end]
        at = written.index(_NAMES[0])
        rest = written[at + len(_NAMES[0]) :]
        place = next(((start, end) for start, said, end in _objects(rest) if said == _ARGUMENTS), None)
        if place is None:
            return
        opened, closed = place
        opening, middle, ending = (part.replace(_IDS[0], ID) for part in (written[:at], rest[:opened], rest[closed:]))
        grammar = CallGrammar("object", "", "", "", opening, middle, ending, name, given)
        yield grammar, text[:start], text[end:]

    def _results(self, head: str, tail: str) -> tuple[str, str, ResultFormat | None]:
        """What stands before and behind a call as far as it is the call's, and how results are written."""
        text = self._behind_question([self._call(0)], _RESULT)
        if text is None or text.count(_RESULT) != 1:
            return head, tail, None
        before, _, after = text.partition(_RESULT)
        shape = next(self._shapes(before), None)
        if shape is None:
            return head, tail, None
        # As the last of all it may be opened and closed otherwise.
        _, head, between = shape
        own = between.startswith(tail) and bool(between.removeprefix(tail).strip())
        opening = (
            between.removeprefix(tail) if own else between.removeprefix(self._template.common_start(between, tail))
        )
        tail = between.removesuffix(opening)
        quoted = self._behind_question([self._call(0)], _QUOTED)
        quotes = quoted is not None and _QUOTED not in quoted and json.dumps(_QUOTED, ensure_ascii=False) in quoted
        if quotes:
            opening, after = opening.removesuffix('"'), after.removeprefix('"')
        return head, tail, ResultFormat(_marks(opening), _marks(after), quotes)

    def _alone(self) -> ResultFormat | None:
        """How results are written by a template that writes no calls."""
        turns: list[Turn] = [
            _QUESTION,
            {"role": "assistant", "content": _WORDS},
            {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]},
        ]
        text = self._template.render(turns)
        if text is None or text.count(_RESULT) != 1 or _WORDS not in text:
            return None
        before, _, after = text.partition(_WORDS)[2].partition(_RESULT)
        return ResultFormat(_marks(before.removeprefix(self._chat.assistant.after)), _marks(after))

    def _closed(self, tail: str) -> tuple[str, str]:
        """What closes calls, and what closes their turn."""
        end = self._chat.assistant.after
        if tail.endswith(end):
            return tail.removesuffix(end), end
        pieces = self._template.pieces(tail)
        controls = self._template.tokenizer.added_tokens_encoder
        last = max((at for at, piece in enumerate(pieces) if piece in controls), default=len(pieces))
        return "".join(pieces[:last]), "".join(pieces[last:])

    def _with_more(self, grammar: CallGrammar, opening: str, call_end: str) -> CallGrammar:
        """With what stands between several calls."""
        two = self._behind_question([self._call(0), self._call(1)])
        marks = grammar.pairs
        if marks is not None:
            last = marks.last.removesuffix(call_end)
            value = replace(marks, last=last).value_end
            grammar = replace(
                grammar,
                pairs=replace(marks, last=last, empty=marks.empty.removesuffix(call_end)),
                after=last.removeprefix(value),
            )
        core = grammar.write([_marked_call(0)]).text.removeprefix(grammar.before)
        core = core if marks is not None else core.removesuffix(grammar.after)
        between = None
        if two is not None:
            behind = two.partition(core.replace(ID, _IDS[0]))[2]
            other = grammar.write([_marked_call(1)]).text.removeprefix(grammar.before)
            other = other if marks is not None else other.removesuffix(grammar.after)
            start = other.partition(_NAMES[1])[0]
            found = behind.partition(start + _NAMES[1])
            between = found[0] if found[1] else None
        controls = self._template.tokenizer.added_tokens_encoder
        if grammar.is_bare and grammar.kind == "object" and _MAY_OPEN in controls:
            grammar = replace(grammar, may_open=(_MAY_OPEN,))
        if between is None:
            after = "" if marks is not None else grammar.after
            is_listed = grammar.is_bare and grammar.kind == "object"
            between = "; " if is_listed else f"{after}{call_end}{opening}{grammar.before}"
        return replace(grammar, between=between)

    def _joint(self, opening: str, grammar: CallGrammar) -> str:
        """What stands between words and calls."""
        text = self._behind_question([self._call(0)], words=_WORDS)
        if text is None or _WORDS not in text:
            return ""
        between = text.partition(_WORDS)[2].partition(_NAMES[0])[0]
        start = grammar.write([_marked_call(0)]).text.partition(_NAMES[0])[0]
        return between.removesuffix(start) if between.endswith(start) else "\n"

    def _unspoken(self, opening: str, content: str) -> str:
        """What the header of thoughts has, of turns whose headers say what they are."""
        thoughts = self._chat.thoughts
        return "" if thoughts is None else thoughts.header.removeprefix(opening).removesuffix(content)

    def _marked(self) -> CallGrammar:
        source = str(self._template.source)
        known = [grammar for one, other, grammar in _MARKS if one in source and other in source]
        known += [g for one, other, g in _MARKS if {one, other} <= self._template.tokenizer.added_tokens_encoder.keys()]
        return known[0] if known else OWN_GRAMMAR


def _marked_call(number: int) -> ToolCall:
    return ToolCall(_NAMES[number], _ARGUMENTS, _IDS[number])


def _marks(text: str) -> str:
    return text.replace(_NAMES[0], TOOL).replace(_IDS[0], ID)


def _objects(text: str) -> Iterator[tuple[int, Any, int]]:
    """The JSON objects of a text, those in others too: where each starts, what it says, and where it ends."""
    for brace in re.finditer(r"\{", text):
        with suppress(ValueError):
            yield brace.start(), *json.JSONDecoder().raw_decode(text, brace.start())
