"""Writes messages for a model: turns, or parts of one user's turn if user and model must alternate.

Tools are described by the model's own template, or in a format of ours if it has none.
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
"""A whole turn; a part of a user's turn; or a leading part of one, with no separator behind it. The template's text
around parts is added where they are read."""


class TurnText(NamedTuple):
    """A text to encode, with its kind."""

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
    """Write a system prompt; `later`: one after other messages, which may be part of a user's turn."""
    in_users_turn = chat.leads or (later and chat.later is None)
    if chat.merges is None or not in_users_turn:
        return TurnText(chat.turn("system", words, later=later))
    return TurnText(chat.part(words), "part") if later else TurnText(chat.system.around(words), "lead")


def question(words: str, chat: ChatFormat, name: str | None = None) -> TurnText:
    """Write a user's message, or a question to the model."""
    if chat.merges is None:
        return TurnText(chat.turn("user", words, name))
    return TurnText(chat.part(words, name), "part")


def tools_format(chat: ChatFormat) -> ToolsFormat:
    """Return the format of a model's tool calls: its template's, or ours if that has none."""
    if chat.tools is not None:
        return chat.tools
    opening, end = chat.assistant.plain, chat.assistant.after
    return ToolsFormat(OWN_GRAMMAR, opening, words_end=end, call_end=end)


def tools_prompt(
    tools: Sequence[Mapping[str, Any]], system: str | None, chat: ChatFormat, *, later: bool
) -> list[TurnText]:
    """Write the description of tools with the system prompt of the agent that may call them.

    Args:
        tools: Their descriptions, in OpenAI's format.
        system: The system prompt, if there is one.
        chat: The model's chat format.
        later: Whether other messages come before.
    """
    tell = tools_format(chat).tell
    prompt = None if tell is None else tell(tools, None if chat.leads else system)
    if prompt is None:
        words = _OWN_WORDS + "\n".join(json.dumps(function_of(tool), ensure_ascii=False) for tool in tools)
        return [instructions(words if system is None else f"{system}\n\n{words}", chat, later=later)]
    own = [instructions(system, chat, later=later)] if chat.leads and system is not None else []
    return [TurnText(_as_later_turn(prompt, chat) if later else prompt), *own]


def _as_later_turn(prompt: PromptText, chat: ChatFormat) -> PromptText:
    """Rewrite a leading system turn as instructions that follow other turns."""
    opening, closing, form = chat.system.plain, chat.system.after, chat.later
    inner = _inner(prompt, opening, closing)
    if form is None or inner is None:
        return prompt
    return PromptText.special(form.plain) + inner + PromptText.special(form.after)


def _inner(text: PromptText, opening: str, closing: str) -> PromptText | None:
    """Return a text without this opening and closing; None if it does not have them."""
    parts = [*text.parts]
    if not parts or not (parts[0][1] and parts[-1][1] and parts[0][0].startswith(opening)):
        return None
    parts[0] = (parts[0][0].removeprefix(opening), True)
    if not parts[-1][0].endswith(closing):
        return None
    parts[-1] = (parts[-1][0].removesuffix(closing), True)
    return PromptText(tuple(part for part in parts if part[0]))


def tool_result_turn(words: str, tool: str, call: str, chat: ChatFormat) -> TurnText:
    """Write the result of a tool: as a turn of its own, or as a user's."""
    result = tools_format(chat).result
    if result is None:
        return question(words, chat, tool)
    return TurnText(result.around(words, tool, call))
