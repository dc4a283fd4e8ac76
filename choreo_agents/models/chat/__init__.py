"""Chat formats, derived from a model's chat template: turns, system prompts, thinking and tool calls."""

from choreo_agents.models.chat.format import ChatFormat, Role, ThoughtsFormat, TurnFormat
from choreo_agents.models.chat.template_analysis import chat_format
from choreo_agents.models.chat.tool_prompt import (
    Kind,
    TurnText,
    instructions,
    question,
    tool_result_turn,
    tools_format,
    tools_prompt,
)
from choreo_agents.models.chat.tools import BrokenCall, CallPart, TextPart, ToolCall

__all__ = [
    "BrokenCall",
    "CallPart",
    "ChatFormat",
    "Kind",
    "Role",
    "TextPart",
    "ThoughtsFormat",
    "ToolCall",
    "TurnFormat",
    "TurnText",
    "chat_format",
    "instructions",
    "question",
    "tool_result_turn",
    "tools_format",
    "tools_prompt",
]
