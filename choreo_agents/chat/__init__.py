"""Chat messages in, chat messages out: what stands between LangChain's messages and the turns of a model.

Read `tools` (what an agent may call), `speech` (what its tokens say), `speaking` (the same as it comes), `turns`
(what was said and called, as it is told again).
"""

from choreo_agents.chat.asking import (
    ChatRequest,
    Reuse,
    answer_format,
    answer_header,
    closed,
    schema_of_type,
    thinking_before,
)
from choreo_agents.chat.call import ChatCall, astreamed, count_tokens, streamed
from choreo_agents.chat.constraints import CompiledConstraints, required_call
from choreo_agents.chat.output_stream import OutputStream
from choreo_agents.chat.recording import RecordedChats, remove_recording
from choreo_agents.chat.tools import Described, Tool, ToolChoice, described_tools, own_turns, required_tools
from choreo_agents.chat.turns import (
    THOUGHT_BLOCKS,
    calls_made,
    message_turn,
    thoughts_of,
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
    "Tool",
    "ToolChoice",
    "answer_format",
    "answer_header",
    "astreamed",
    "calls_made",
    "closed",
    "context_of",
    "count_tokens",
    "described_tools",
    "message_turn",
    "own_turns",
    "remove_recording",
    "required_call",
    "required_tools",
    "schema_of_type",
    "streamed",
    "thinking_before",
    "thoughts_of",
    "tools_called",
]
