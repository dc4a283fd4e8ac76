"""Tools of an agent: descriptions in OpenAI's format, made of all forms that LangChain takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import ChatFormat, TurnText, instructions, tools_prompt

Tool = BaseTool | Callable[..., Any] | type | Mapping[str, Any]
"""A tool as `bind_tools` takes it: a LangChain tool, a function with a docstring, a pydantic model or TypedDict, or a
description in the format of OpenAI, Anthropic or JSON schema."""
Described = tuple[Mapping[str, Any], ...]
"""Descriptions of tools in OpenAI's format."""
ToolChoice = str
"""`"auto"`: may call; `"none"`: cannot call; `"required"`, or a tool's name: must make one such call."""


def described_tools(agent: str, tools: Sequence[Tool] | None, choice: Any) -> Described:
    """Return the descriptions of an agent's tools; none if it cannot call them.

    Args:
        agent: Name of the agent.
        tools: Its tools.
        choice: See `ToolChoice`.

    Raises:
        InvalidRequestError: A tool cannot be described, two have the same name, or the choice cannot be met.
    """
    if tools is None:
        tools = ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequestError(f"the tools of {agent!r} must be a list, such as [search], not {tools!r:.80}")
    described = [_describe(agent, tool) for tool in tools]
    names = [tool["function"]["name"] for tool in described]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise InvalidRequestError(f"{agent!r} has several tools named {twice[0]!r}: give each its own name")
    if choice not in ("auto", "none", *(["required", *names] if names else [])):
        hint = f"its tools are {', '.join(names)}: use one of them" if names else "it has no tools: pass some"
        raise InvalidRequestError(
            f"tool_choice={choice!r} of {agent!r} is not possible: {hint}, or leave tool_choice out"
        )
    return () if choice == "none" else tuple(described)


def required_tools(tools: Described, choice: Any) -> tuple[Described, tuple[str, ...]]:
    """Return the tools that a call may use, and the names of those of which it must call one.

    Args:
        tools: All tools.
        choice: `"auto"` or None: may call; `"none"` or False: cannot; `"any"`, `"required"` or True: must call one; a
            tool's name, or OpenAI's object with one: must call this one.

    Raises:
        InvalidRequestError: There is no such tool.
    """
    names = tuple(str(tool["function"]["name"]) for tool in tools)
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
        available = ", ".join(map(repr, names)) or "there are no tools: pass some"
        raise InvalidRequestError(f"tool_choice={choice!r} names no tool; available: {available}")
    return tools, (choice,)


def _describe(agent: str, tool: Tool) -> Mapping[str, Any]:
    try:
        description = convert_to_openai_tool(tool)
    except Exception as error:  # whatever a tool's own code, or pydantic, raises
        raise InvalidRequestError(
            f"cannot describe {tool!r}, a tool of {agent!r}: pass a function with a docstring, a pydantic model, a "
            f"LangChain tool or its description ({' '.join(str(error).split()):.200})"
        ) from error
    function = description.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(
            f"{tool!r}, a tool of {agent!r}, is not a function: tools that the provider runs itself are not supported"
        )
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise InvalidRequestError(f"the parameters of {function['name']!r}, a tool of {agent!r}, must be a JSON schema")
    return description


def own_turns(system: str | None, tools: Described, chat: ChatFormat, *, later: bool) -> list[TurnText]:
    """Return the turns of an agent's system prompt and tools.

    Args:
        system: System prompt; None: it has none.
        tools: Descriptions of its tools.
        chat: Chat format of its model.
        later: Whether other turns come before.
    """
    if tools:
        return tools_prompt(tools, system, chat, later=later)
    return [] if system is None else [instructions(system, chat, later=later)]
