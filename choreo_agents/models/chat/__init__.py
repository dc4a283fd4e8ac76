"""How conversations look to one model: turns, instructions and thoughts, as its chat template writes them."""

from choreo_agents.models.chat.deriving import chat_format
from choreo_agents.models.chat.format import ChatFormat, Role, ThoughtsFormat, TurnFormat
from choreo_agents.models.chat.telling import (
    Kind,
    Said,
    instructions,
    question,
    result_said,
    tools_format,
    tools_told,
)
from choreo_agents.models.chat.tools import BrokenCall, CallPart, SaidWords, ToolCall

__all__ = [
    "BrokenCall",
    "CallPart",
    "ChatFormat",
    "Kind",
    "Role",
    "Said",
    "SaidWords",
    "ThoughtsFormat",
    "ToolCall",
    "TurnFormat",
    "chat_format",
    "instructions",
    "question",
    "result_said",
    "tools_format",
    "tools_told",
]
