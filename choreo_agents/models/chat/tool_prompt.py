"""What others tell a model: turns of their own, or parts of one user's turn where users and model must take turns.

Of tools by its own template, or in our words where that knows nothing of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from choreo_agents.models.chat.format import ChatFormat
from choreo_agents.models.chat.tools.format import ToolsFormat, function_of
from choreo_agents.models.chat.tools.grammar import CallGrammar
from choreo_agents.models.prompt_text import PromptText

Kind = Literal["turn", "part", "lead"]
"""A whole turn, with its frame; a part of a user's turn; or a part that closes itself: nothing stands between it and
what follows. What stands around parts is put in where they are shown."""


class TurnText(NamedTuple):
    """Something to encode, and as what it stands in a conversation."""

    text: PromptText
    kind: Kind = "turn"


OWN_GRAMMAR = CallGrammar(
    "object",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    after="\n</tool_call>",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    end="}",
)
_OWN_WORDS = """You may call tools. To call one, write a JSON object with its name and its arguments in tags:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
Several calls follow each other, and nothing follows the last. What a tool returns is told by its name. The tools:
"""


def instructions(words: str, chat: ChatFormat, *, later: bool) -> TurnText:
    """A system prompt; `later`: one that comes after anything else, and may have no turn of its own there."""
    in_users_turn = chat.leads or (later and chat.later is None)
    if chat.merges is None or not in_users_turn:
        return TurnText(chat.turn("system", words, later=later))
    return TurnText(chat.part(words), "part") if later else TurnText(chat.system.around(words), "lead")


def question(words: str, chat: ChatFormat, name: str | None = None) -> TurnText:
    """What a user says, or what a model is asked."""
    if chat.merges is None:
        return TurnText(chat.turn("user", words, name))
    return TurnText(chat.part(words, name), "part")


def tools_format(chat: ChatFormat) -> ToolsFormat:
    """How a model calls tools: as its template has it, or in our own form."""
    if chat.tools is not None:
        return chat.tools
    opening, end = chat.assistant.plain, chat.assistant.after
    return ToolsFormat(OWN_GRAMMAR, opening, words_end=end, call_end=end)


def tools_prompt(
    tools: Sequence[Mapping[str, Any]], system: str | None, chat: ChatFormat, *, later: bool
) -> list[TurnText]:
    """What tells of tools, and the instructions of who may call them.

    Args:
        tools: Their descriptions, as OpenAI has them.
        system: The instructions, if there are any.
        chat: The model's.
        later: Whether anything comes before.
    """
    tell = tools_format(chat).tell
    told = None if tell is None else tell(tools, None if chat.leads else system)
    if told is None:
        words = _OWN_WORDS + "\n".join(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools)
        return [instructions(words if system is None else f"{system}\n\n{words}", chat, later=later)]
    own = [instructions(system, chat, later=later)] if chat.leads and system is not None else []
    return [TurnText(_later(told, chat) if later else told), *own]


def _later(told: PromptText, chat: ChatFormat) -> PromptText:
    """The same behind other turns, in the form that instructions have there."""
    opening, closing, form = chat.system.plain, chat.system.after, chat.later
    inner = _inner(told, opening, closing)
    if form is None or inner is None:
        return told
    return PromptText.special(form.plain) + inner + PromptText.special(form.after)


def _inner(text: PromptText, opening: str, closing: str) -> PromptText | None:
    """What stands between two frames, if a text begins and ends with them."""
    parts = [*text.parts]
    if not parts or not (parts[0][1] and parts[-1][1] and parts[0][0].startswith(opening)):
        return None
    parts[0] = (parts[0][0].removeprefix(opening), True)
    if not parts[-1][0].endswith(closing):
        return None
    parts[-1] = (parts[-1][0].removesuffix(closing), True)
    return PromptText(tuple(part for part in parts if part[0]))


def tool_result_turn(words: str, tool: str, call: str, chat: ChatFormat) -> TurnText:
    """What a tool has returned: a turn of its own, or a user's."""
    result = tools_format(chat).result
    if result is None:
        return question(words, chat, tool)
    return TurnText(result.around(words, tool, call))
