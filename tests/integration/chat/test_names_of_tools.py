"""Tools of any name: what a model calls is what it has named, or the tool is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from langchain_choreo import ChatChoreo
from langchain_core.messages import AIMessage
from support.checkpoints import FAMILIES
from support.speaking import engine_that_says
from support.tool_templates import GLM, TOOL_CHECKPOINTS

from choreo_agents import START, Agent, ChoreoGraph, PromptText
from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import ToolCall, tools_format

COMMON = ["find-it", "find it", "1st", "import", "a.b-c", "\ufb01nd", "f\u00fcr", "find.", "\u67e5\u627e"]
ODD = [
    "f(x)",
    "a{b}",
    "bob's",
    'say "hi"',
    "[x]",
    "a<arg_key>b",
    " find",
    "find\nit",
    "<|im_end|>",
    "<tool_call>",
    "a=b",
]
KEYS = ["from", "content-type", "a thing", "filter[of]", "a,b", "x'y", "\ufb01", "#", "a=b", "(", " a"]


def tool_of(name: str, *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in required}, "required": [*required]}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


@pytest.fixture(scope="module", params=[*TOOL_CHECKPOINTS])
def calling(request: pytest.FixtureRequest) -> Iterator[Callable[[ToolCall], AIMessage]]:
    """What is read where a model calls as its family does, beside tools with names that are much alike."""
    written: list[PromptText] = []
    with engine_that_says(TOOL_CHECKPOINTS[request.param], lambda prompt: written[-1]) as (engine, _):
        chat = ChatChoreo(engine=engine, max_tokens=150, thinking=None if request.param == "listed" else False)

        def called(call: ToolCall) -> AIMessage:
            how = tools_format(engine.chat)
            written.append(how.grammar.write([call]) + PromptText.special(how.call_end))
            decoys = [name for name in {"find", call.name[:1], call.name[1:]} if name.strip() and name != call.name]
            tools = [tool_of(call.name, *call.arguments), *map(tool_of, decoys)]
            return chat.bind_tools(tools).invoke("Go.")

        yield called


@pytest.mark.parametrize("name", [*COMMON, *ODD])
def test_a_tool_is_called_by_its_own_name_or_refused(calling: Callable[[ToolCall], AIMessage], name: str) -> None:
    try:
        message = calling(ToolCall(name, {"of": "x"}, "callid001"))
    except InvalidRequestError as error:
        assert name in ODD and repr(name) in str(error)
    else:
        assert [(each["name"], each["args"]) for each in message.tool_calls] == [(name, {"of": "x"})], message


@pytest.mark.parametrize("key", KEYS)
def test_so_are_what_it_is_called_with(calling: Callable[[ToolCall], AIMessage], key: str) -> None:
    try:
        message = calling(ToolCall("look", {"a": "1", key: "x, from=(1)"}, "callid001"))
    except InvalidRequestError as error:
        assert KEYS.index(key) > 2 and repr(key) in str(error)
    else:
        assert [each["args"] for each in message.tool_calls] == [{"a": "1", key: "x, from=(1)"}], message


def test_an_agent_says_so_too() -> None:
    """Pairs have no quotes around a name: blanks at its start would be lost."""
    family = replace(FAMILIES["GLM-4.5"], template=GLM)
    with engine_that_says(family, "Done.") as (engine, _):
        graph = ChoreoGraph().add_node(Agent("ann", tools=[tool_of(" find")])).add_edge(START, "ann")
        with pytest.raises(InvalidRequestError, match="cannot write a parsable call"):
            graph.compile(engine=engine).invoke({"messages": [("user", "Go.")]})
