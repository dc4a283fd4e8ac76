"""Conversion between LangChain's chat messages and the turns of a model.

Read `turns` (messages to prompt text), `tools` (descriptions of tools), `output_stream` (sampled tokens to text, calls
and message chunks), `call` (one call of a chat model).
"""

from choreo_agents.chat.asking import (
    ChatRequest,
    Reuse,
    Thinks,
    answer_format,
    answer_header,
    close_schema,
    schema_of_type,
    thinking_before,
    thinks,
    with_budget,
)
from choreo_agents.chat.call import ChatCall, astreamed, count_tokens, streamed
from choreo_agents.chat.constraints import CompiledConstraints
from choreo_agents.chat.output_stream import OutputStream
from choreo_agents.chat.recording import RecordedChats, remove_recording
from choreo_agents.chat.tools import Described, Tool, ToolChoice, described_tools, own_turns, required_tools
from choreo_agents.chat.turns import (
    THOUGHT_BLOCKS,
    UserTurn,
    message_turn,
    separator,
    thoughts_of,
    tool_calls_of,
    tools_called,
)
from choreo_agents.models import context_of

__all__ = [
    "THOUGHT_BLOCKS",
    "ChatCall",
    "ChatRequest",
    "CompiledConstraints",
    "Described",
    "OutputStream",
    "RecordedChats",
    "Reuse",
    "Thinks",
    "Tool",
    "ToolChoice",
    "UserTurn",
    "answer_format",
    "answer_header",
    "astreamed",
    "close_schema",
    "context_of",
    "count_tokens",
    "described_tools",
    "message_turn",
    "own_turns",
    "remove_recording",
    "required_tools",
    "schema_of_type",
    "separator",
    "streamed",
    "thinking_before",
    "thinks",
    "thoughts_of",
    "tool_calls_of",
    "tools_called",
    "with_budget",
]
