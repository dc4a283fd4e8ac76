"""Parses OpenAI's messages and converts them to LangChain's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from choreo_server.fields import Fields, Harmless, Instead

_ANEW = 'answers cannot be continued, but `response_format: {"regex": "Begin.*"}` sets how one begins'
_OWN = {"assistant": ("tool_calls", "refusal", "reasoning_content", "reasoning"), "tool": ("tool_call_id",)}
"""Fields that only messages of that role may have."""


class FunctionIn(Fields):
    """The function of a tool call."""

    name: str
    """of the tool"""
    arguments: str | None = None
    """as JSON; null: none"""


class ToolCallIn(Fields):
    """A tool call of the model."""

    id: str
    """which its result names"""
    function: FunctionIn
    """what is called"""
    type: Literal["function"] | None = None
    """`"function"`, as all are"""
    index: Annotated[Any, Harmless("calls are numbered by their order")] = None
    provider_specific_fields: Annotated[Any, Harmless("it is another server's")] = None


class MessageIn(Fields):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`"system"` and `"developer"` alike, `"user"`, `"assistant"`, `"tool"`"""
    content: str | list[dict[str, Any]] | None = None
    """words, or a list of parts that are text"""
    name: str | None = None
    """who speaks, or which tool"""
    tool_calls: list[ToolCallIn] | None = None
    """calls that the model has made"""
    tool_call_id: str | None = None
    """of a tool's result: of which call it is"""
    reasoning_content: str | None = None
    """what the model has thought before"""
    reasoning: str | None = None
    """another name of `reasoning_content`"""
    refusal: str | None = None
    """what the model has said in place of an answer: read as its words"""
    annotations: Annotated[Any, Harmless("they are about text that is present")] = None
    cache_control: Annotated[Any, Harmless("everything that was read is cached")] = None
    provider_specific_fields: Annotated[Any, Harmless("it is another server's")] = None
    audio: Annotated[Any, Instead("send its text in `content`")] = None
    function_call: Annotated[Any, Instead('use `tool_calls`, and `role: "tool"` for results')] = None
    reasoning_details: Annotated[Any, Instead("use `reasoning_content`", unless=([],))] = None
    thinking_blocks: Annotated[Any, Instead("use `reasoning_content`", unless=([],))] = None
    prefix: Annotated[Any, Instead(_ANEW, unless=(False,))] = None
    partial: Annotated[Any, Instead(_ANEW, unless=(False,))] = None

    @model_validator(mode="after")
    def _require_role_fields(self) -> Self:
        for role, names in _OWN.items():
            for name in names if role != self.role else ():
                if getattr(self, name):
                    raise _field_error(name, f"only messages of role {role!r} may have it: leave it out")
        if self.reasoning and self.reasoning_content not in (None, "", self.reasoning):
            raise _field_error("reasoning", "`reasoning_content` has another value: leave one of them out")
        return self


def _field_error(name: str, why: str) -> PydanticCustomError:
    return PydanticCustomError("misplaced", "{why}", {"why": why, "field": name})


def chat_messages(messages: Sequence[MessageIn]) -> list[BaseMessage]:
    """Convert the messages of a request."""
    return [_answer(message) if message.role == "assistant" else _message(message) for message in messages]


def _message(message: MessageIn) -> BaseMessage:
    fields: dict[str, Any] = {"role": message.role, "content": message.content or "", "name": message.name}
    if message.role == "tool":
        fields["tool_call_id"] = message.tool_call_id or ""
    return convert_to_messages([fields])[0]


def _answer(message: MessageIn) -> AIMessage:
    """Convert an assistant message; tool calls that cannot be parsed become `invalid_tool_calls`."""
    content: Any = message.content or message.refusal or ""
    if not isinstance(content, str):
        content = [_as_text_part(part) for part in content]
    if thoughts := message.reasoning_content or message.reasoning:
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [{"type": "reasoning", "reasoning": thoughts}, *text]
    calls, broken = [], []
    for call in message.tool_calls or ():
        raw = {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments or "{}"}}
        try:
            if (read := parse_tool_call(raw, return_id=True)) is not None:
                calls.append(read)
        except (OutputParserException, ValueError, RecursionError) as error:  # numbers too long, lists too deep
            broken.append(make_invalid_tool_call(raw, str(error)))
    return AIMessage(content, name=message.name, tool_calls=calls, invalid_tool_calls=broken)


def _as_text_part(part: dict[str, Any]) -> dict[str, Any]:
    """Convert a content part that is a refusal to text."""
    is_refusal = part.get("type") == "refusal" and isinstance(part.get("refusal"), str)
    return {"type": "text", "text": part["refusal"]} if is_refusal else part
