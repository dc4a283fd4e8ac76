"""OpenAI's messages as LangChain's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from pydantic import BaseModel


class _Function(BaseModel):
    name: str
    arguments: str = "{}"


class _Call(BaseModel):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class ToldMessage(BaseModel):
    """One message of a request. What else clients send back of an answer is passed over."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """What was thought before it."""


def chat_messages(told: Sequence[ToldMessage]) -> list[BaseMessage]:
    """A conversation."""
    return [_answer(each) if each.role == "assistant" else _message(each) for each in told]


def _message(told: ToldMessage) -> BaseMessage:
    said: dict[str, Any] = {"role": told.role, "content": told.content or "", "name": told.name}
    if told.role == "tool":
        said["tool_call_id"] = told.tool_call_id or ""
    return convert_to_messages([said])[0]


def _answer(told: ToldMessage) -> AIMessage:
    """What a model has said, calls that nobody can read among it."""
    content: Any = told.content or ""
    if told.reasoning_content:
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [{"type": "reasoning", "reasoning": told.reasoning_content}, *text]
    calls, broken = [], []
    for call in told.tool_calls or ():
        raw = call.model_dump()
        try:
            if (read := parse_tool_call(raw, return_id=True)) is not None:
                calls.append(read)
        except (OutputParserException, ValueError, RecursionError) as error:  # numbers too long, lists too deep
            broken.append(make_invalid_tool_call(raw, str(error)))
    return AIMessage(content, name=told.name, tool_calls=calls, invalid_tool_calls=broken)
