"""What an agent may call, in all forms that LangChain takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import ChatFormat, TurnText, instructions, tools_prompt

Tool = BaseTool | Callable[..., Any] | type | Mapping[str, Any]
"""As `bind_tools` takes it: a tool, a function with a docstring, a pydantic model or TypedDict, or a description as
OpenAI, Anthropic or JSON schema have it."""
Described = tuple[Mapping[str, Any], ...]
"""Descriptions of tools as OpenAI has them."""
ToolChoice = str
"""`"auto"`: it calls if it wants to; `"none"`: it cannot; `"required"`, or a tool's name: it makes one such call."""


def described_tools(agent: str, tools: Sequence[Tool] | None, choice: Any) -> Described:
    """What an agent is told of its tools.

    Args:
        agent: Whose they are.
        tools: What it may call; None: nothing.
        choice: Whether it must.

    Raises:
        InvalidRequestError: One cannot be described, two have one name, or a choice cannot be kept.
    """
    if tools is None:
        tools = ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"the tools of {agent!r} must be in a list, as in [search], not {tools!r:.80}")
    described = [_described(agent, tool) for tool in tools]
    names = [each["function"]["name"] for each in described]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InvalidRequestError(f"{agent!r} has several tools named {twice[0]!r}: nobody could tell which is called")
    if choice not in ("auto", "none", *(["required", *names] if names else [])):
        there = f"its tools are {', '.join(names)}: name one" if names else "it has no tools: give it some"
        raise InvalidRequestError(
            f"tool_choice={choice!r} of {agent!r} cannot be kept, for {there}, or leave tool_choice out"
        )
    return () if choice == "none" else tuple(described)


def required_tools(tools: Described, choice: Any) -> tuple[Described, tuple[str, ...]]:
    """The tools that a call is told of, and the names of those of which it must call one, if it must.

    Args:
        tools: All that may be called.
        choice: `"auto"` or None: it calls if it wants to; `"none"` or False: it cannot; `"any"`, `"required"` or True:
            it calls one; a tool's name, or a description as OpenAI has it: this one.

    Raises:
        InvalidRequestError: There is no such tool.
    """
    names = tuple(str(each["function"]["name"]) for each in tools)
    if isinstance(choice, Mapping):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, Mapping) else None
        choice = choice.get("name") or named or choice.get("type")
    if choice in (None, "auto"):
        return tools, ()
    if choice in ("none", False):
        return (), ()
    if choice in ("any", "required", True) and names:
        return tools, names
    if choice not in names:
        there = ", ".join(map(repr, names)) or "it has no tools: give it some"
        raise InvalidRequestError(f"tool_choice={choice!r} is none of the tools that are there: {there}")
    return tools, (choice,)


def _described(agent: str, tool: Tool) -> Mapping[str, Any]:
    try:
        found = convert_to_openai_tool(tool)
    except Exception as error:  # whatever a tool's own code, or pydantic, raises
        raise InvalidRequestError(
            f"{tool!r}, a tool of {agent!r}, cannot be described: give a function with a docstring, a pydantic model, "
            f"a LangChain tool or its description ({' '.join(str(error).split()):.200})"
        ) from error
    function = found.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{tool!r}, a tool of {agent!r}, is no function: tools that a provider runs itself cannot be called here"
        )
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise InvalidRequestError(f"the parameters of {function['name']!r}, a tool of {agent!r}, must be a JSON schema")
    return found


def own_turns(system: str | None, tools: Described, chat: ChatFormat, *, later: bool) -> list[TurnText]:
    """The turns that tell an agent what it is told alone.

    Args:
        system: Its system prompt, if it has one.
        tools: What it may call.
        chat: Its model's.
        later: Whether anything stands before.
    """
    if tools:
        return tools_prompt(tools, system, chat, later=later)
    return [] if system is None else [instructions(system, chat, later=later)]
