"""Derives a chat format from a chat template, by comparing renderings of placeholder conversations.

The text between two placeholders is cut where one turn ends and the next begins:

    first | user | U | end user  answer | A | end answer  user | U | end

Calls of tools with placeholder names and arguments are rendered, alone and in pairs; what the template writes around
the placeholders is their grammar. Nothing depends on the model's family, and only a template that cannot render a
single question is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.format import NAME, ChatFormat, TurnFormat
from choreo_agents.models.chat.template import ControlEscaper, Template, Turn
from choreo_agents.models.chat.thinking import thoughts_of
from choreo_agents.models.chat.tool_prompt import OWN_GRAMMAR
from choreo_agents.models.chat.tools.format import TOOL, ResultFormat, ToolsFormat
from choreo_agents.models.chat.tools.grammar import ID, CallGrammar, PairMarks, ToolCall
from choreo_agents.models.chat.whole import WholeConversation
from choreo_agents.models.prompt_text import PromptText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SEPARATOR = "\n\n"


def chat_format(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> ChatFormat:
    """Derive the chat format of a tokenizer's template; without one, turns are lines `Role: text`.

    Args:
        tokenizer: The model's tokenizer.
        options: See `Template`.

    Raises:
        ChatTemplateError: The template cannot render a conversation of one question.
        InvalidRequestError: An option cannot be one.
    """
    template = Template(tokenizer, options)
    if tokenizer.chat_template is None:
        system, user, assistant = (TurnFormat(f"{role}: ", None, "\n") for role in ("System", "User", "Assistant"))
        return ChatFormat(template.bos, system, user, assistant, later=system)
    return _TemplateAnalysis(template).format()


def mark_turn(role: str, number: int = 0, **more: str) -> Turn:
    """Return a turn whose content is a placeholder."""
    return {"role": role, "content": f"\u241f{role}{number}\u241f"} | more


class _TemplateAnalysis:
    """Derivation of the turns of one template."""

    def __init__(self, template: Template) -> None:
        self.template = template
        around = template.around
        alone = around([mark_turn("user")])
        if alone is None:
            raise template.make_error()
        self.before_first, self.shown_end = alone
        self.talk = around([mark_turn("user"), mark_turn("assistant"), mark_turn("user", 1)])
        self.last = around([mark_turn("user"), mark_turn("assistant")])
        self.lone = None if self.last is not None else around([mark_turn("assistant")])
        self.prompted = around([mark_turn("user")], answer=True)
        self.pair = around([mark_turn("user"), mark_turn("user", 1)])
        self._split_turns()

    def format(self) -> ChatFormat:
        """Return the chat format."""
        user, assistant = self._user(), self._assistant()
        answer = self._answer()
        if not (answer or "").strip() and not assistant.plain.strip():
            # An answer has no header: it then begins with what closes the question.
            close = user.after.lstrip()
            assistant = replace(assistant, plain=close + assistant.plain, named=None)
            answer, user = None, replace(user, after=user.after.removesuffix(close))
        first = self._first_user()
        bos, system, leads = self._system(first)
        default = first.removeprefix(bos)
        chat = ChatFormat(
            bos,
            system,
            user,
            assistant,
            later=self._later(first),
            answer=None if answer is None or answer.rstrip(" ") == assistant.plain.rstrip(" ") else answer,
            default_system=default,
            merges=_SEPARATOR if leads or not self.has_pairs else None,
            leads=leads,
        )
        chat = replace(chat, thoughts=thoughts_of(self.template, chat))
        usual = chat.thoughts is not None and chat.thoughts.usual
        tools = tools_of(self.template, chat)
        whole = WholeConversation(self.template, usual=usual, result=None if tools is None else tools.result)
        return replace(chat, tools=tools, whole=whole)

    def _split_turns(self) -> None:
        """Find the texts that open and close the user's turns, and close the assistant's."""
        common_start, common_end = self.template.common_start, self.template.common_end
        talk = self.talk
        opened = talk[1] if talk is not None else self.last[1] if self.last is not None else self._answer_opening()
        self.user_end = common_start(self.shown_end, opened)
        between = None if self.pair is None else self.pair[1]
        if between is not None and self.user_end.strip() == opened.strip():
            # The template opens an answer whether or not one is requested.
            self.user_end = between.removesuffix(common_end(between, self.before_first))
        self.assistant_open = opened.removeprefix(self.user_end)
        shown = "" if self.last is None else self.last[2]
        behind = talk[2] if talk is not None else None
        ends = [] if behind is None else [behind.removeprefix(common_start(shown, behind))]
        if between is not None:
            ends.insert(0, between.removeprefix(self.user_end))
        places = [self.before_first, *([] if behind is None else [behind])]
        fitting = [end for end in ends if end and all(place.endswith(end) for place in places)]
        fitting = fitting or [end for end in ends if end and places[-1].endswith(end)]
        guess = common_end(*places) if len(places) > 1 else self.before_first.removeprefix(self.template.bos)
        self.user_open = fitting[0] if fitting else guess
        self.has_pairs = between is not None and between == self.user_end + self.user_open
        self.assistant_end = shown if behind is None else behind.removesuffix(self.user_open)

    def _answer_opening(self) -> str:
        """Return the text that opens an answer, for a template that renders none after a question."""
        return self._final_end() if self.lone is None else self.shown_end + self.lone[0].removeprefix(self.template.bos)

    def _final_end(self) -> str:
        return self.shown_end if self.prompted is None else self.prompted[1]

    def _user(self) -> TurnFormat:
        named = self.template.around([mark_turn("user"), mark_turn("assistant"), mark_turn("user", 1, name=NAME)])
        opening = None if named is None else named[2].removeprefix(self.assistant_end)
        if opening is None and NAME in (alone := (self.template.around([mark_turn("user", name=NAME)]) or [""])[0]):
            opening = alone.removeprefix(self._first_user())
        return TurnFormat(self.user_open, _named_opening(opening), self.user_end, self._trims("user"))

    def _assistant(self) -> TurnFormat:
        more = [mark_turn("user", 1)] if self.talk is not None else []
        named = self.template.around([mark_turn("user"), mark_turn("assistant", name=NAME), *more])
        opening = None if named is None else named[1].removeprefix(self.user_end)
        return TurnFormat(self.assistant_open, _named_opening(opening), self.assistant_end, self._trims("assistant"))

    def _answer(self) -> str | None:
        """Return the header of the answer that the model is to write; None if the template adds none."""
        opening = self._final_end()
        if opening == self.shown_end and self.assistant_open.strip():
            return None
        return opening.removeprefix(self.user_end)

    def _first_user(self) -> str:
        """Return the text before the first user's turn if there are no instructions."""
        shared = self.template.common_end(self.before_first, self.user_open)
        return self.before_first.removesuffix(shared)

    def _system(self, first: str) -> tuple[str, TurnFormat, bool]:
        """Return the start of conversations, the turn of instructions, and whether that is part of the user's turn."""
        parts = self.template.around([mark_turn("system"), mark_turn("user")])
        if parts is None:
            return first, TurnFormat("", None, _SEPARATOR), True
        before, between, _ = parts
        bos = self._start(first, before)
        opening = before.removeprefix(bos)
        trims = self._trims("system")
        if between.endswith(self.user_open):
            named = self.template.around([mark_turn("system", name=NAME), mark_turn("user")])
            spoken = None if named is None else _named_opening(named[0].removeprefix(bos))
            return bos, TurnFormat(opening, spoken, between.removesuffix(self.user_open), trims), False
        return bos, TurnFormat(opening.removeprefix(self.user_open), None, between, trims), True

    def _start(self, first: str, before: str) -> str:
        """Return the common start of conversations with and without instructions."""
        common, bos = self.template.common_start(first, before), self.template.bos
        if common == first:
            return first
        return bos if bos and common.startswith(bos) and not self.user_open.startswith(bos) else ""

    def _later(self, first: str) -> TurnFormat | None:
        """Return the turn of instructions after other turns, if need be a developer's; None if there is neither."""
        talk = [mark_turn("user"), mark_turn("assistant"), mark_turn("system"), mark_turn("user", 1)]
        for first_said in ([], [mark_turn("system", 1)]):  # some templates move a lone one to the front
            parts = self.template.around([*first_said, *talk])
            form = None if parts is None else self._instructions(parts[-3].removeprefix(self.assistant_end), parts[-2])
            if form is not None:
                return form
        parts = self.template.around([mark_turn("developer"), mark_turn("user")])
        is_known = "developer" in str(self.template.tokenizer.chat_template)  # else it writes any role
        if parts is None or not is_known or not parts[0].startswith(first):
            return None
        return self._instructions(parts[0].removeprefix(first), parts[1])

    def _instructions(self, opening: str, behind: str) -> TurnFormat | None:
        """Return a turn of instructions with this text around its content; None if it is no turn of its own."""
        if not opening.strip() or not behind.endswith(self.user_open):
            return None
        return TurnFormat(opening, None, behind.removesuffix(self.user_open), self._trims("system"))

    def _trims(self, role: str) -> bool:
        """Return whether the template strips blanks around the messages of a role."""
        around = {"user": ["user"], "assistant": ["user", "assistant"], "system": ["system", "user"]}
        turns = [mark_turn(name) for name in around[role]]
        spaced = [turn | {"content": f" {turn['content']} "} if turn["role"] == role else turn for turn in turns]
        bare = self.template.render(turns)
        return bare is not None and self.template.render(spaced) == bare


def _named_opening(opening: str | None) -> str | None:
    """Return the opening of a named turn if it contains the name, else None."""
    return opening if opening is not None and NAME in opening else None


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
        """True if the template takes arguments as JSON text only."""
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
