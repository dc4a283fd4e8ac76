"""Nothing that is said in a conversation is missing from its prompt, whatever a chat template has no place for."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage
from support.templates import TEMPLATES, tokenizer_for
from support.tool_templates import TOOL_TEMPLATES, tool_tokenizer

from choreo_agents.chat.prompt import whole_prompt
from choreo_agents.models import tools_format
from choreo_agents.models.chat.template_analysis import chat_format

FAMILIES = [*TEMPLATES, *(f"{family}, with tools" for family in TOOL_TEMPLATES)]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": {}}} for name in "NS"
]
HISTORIES = {
    "two system messages": "s s u",
    "a system message in the middle": "s u a s u",
    "a system message at the end": "u a s",
    "a developer's message": "u d u",
    "two questions": "u u",
    "two answers": "u a a u",
    "an answer first": "a u",
    "somebody of another name": "u x a u",
    "a call": "u c r u",
    "text beside a call": "u C r a u",
    "two calls": "u cc r r u",
    "two calls, results in the other order": "u cc R r u",
    "two calls, one result": "u cc r u",
    "two calls in two answers, then both results": "u c c R r",
    "a call without arguments beside another": "u ce r r",
    "a result without its call": "u r u",
    "a call as the last word": "u c",
}
"""Letters: system, user, assistant, developer, other; calls, with text or without arguments; results of the earliest or
the latest call that has none."""


class Talk:
    """A history, and what was said in it."""

    def __init__(self, letters: str) -> None:
        self.messages: list[BaseMessage] = []
        self.said: list[str] = []
        self.results: dict[str, str] = {}
        """Which tool's, by their words."""
        open_calls: list[dict[str, Any]] = []
        for letter in letters.split():
            words = self._say(f"WORDS{len(self.messages)}W") if letter.strip("ce") else ""
            if letter in "Rr":
                call = open_calls.pop(0 if letter == "r" else -1) if open_calls else {"name": "", "id": "none"}
                self.messages.append(ToolMessage(words, tool_call_id=call["id"]))
                self.results |= {words: call["name"]} if call["id"] != "none" else {}
            elif letter in "suadx":
                kinds: Any = {"s": SystemMessage, "u": HumanMessage, "a": AIMessage}
                role = {"d": "developer", "x": "critic"}.get(letter)
                self.messages.append(ChatMessage(words, role=role) if role else kinds[letter](words))
            else:
                calls = [self._call(each, f"{len(self.messages)}{n}") for n, each in enumerate(letter)]
                open_calls += calls
                self.messages.append(AIMessage(words, tool_calls=calls))

    def _say(self, words: str) -> str:
        self.said.append(words)
        return words

    def _call(self, letter: str, number: str) -> dict[str, Any]:
        args = {} if letter == "e" else {"place": self._say(f"PLACE{number}P")}
        return {"name": self._say(f"tool_{number}_t"), "args": args, "id": f"call{number}"}


@cache
def model_of(family: str) -> Any:
    name, with_tools, _ = family.partition(", with tools")
    tokenizer = tool_tokenizer(name) if with_tools else tokenizer_for(name)
    return SimpleNamespace(chat=chat_format(tokenizer), encode=lambda text: text)


def require_all(family: str, letters: str, tools: Any) -> None:
    model, talk = model_of(family), Talk(letters)
    prompt = whole_prompt(model, talk.messages, tools, model.chat.header(None), thinks=False).text  # type: ignore[attr-defined]
    missing = [words for words in talk.said if words not in prompt]
    assert not missing, f"{missing} are not in {prompt!r}"
    if (result := tools_format(model.chat).result) is not None and "\u241ftool\u241f" in result.before:
        for words, name in talk.results.items():
            assert re.findall(r"tool_\d+_t", prompt[: prompt.index(words)])[-1] == name


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_was_said_is_there(family: str) -> None:
    for letters in HISTORIES.values():
        require_all(family, letters, [])
        require_all(family, letters, TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
@given(letters=st.lists(st.sampled_from(["s", "u", "a", "d", "c", "C", "cc", "ce", "r", "R"]), min_size=1, max_size=7))
@settings(max_examples=8)
def test_so_it_is_in_any_order(family: str, letters: list[str]) -> None:
    require_all(family, " ".join(letters), TOOLS)
