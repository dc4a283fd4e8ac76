"""Chat messages in, chat messages out: what stands between LangChain's messages and the turns of a model.

Read `tools` (what an agent may call), `speech` (what its tokens say), `speaking` (the same as it comes), `history`
(what was called, as it is told again).
"""

from choreo_agents.chat.asking import ChatRequest, Reuse
from choreo_agents.chat.call import ChatCall, astreamed, count_tokens, streamed
from choreo_agents.chat.formats import answer_format, closed, schema_of_type
from choreo_agents.chat.guides import CompiledGuides
from choreo_agents.chat.history import THOUGHT_BLOCKS, calls_in, calls_made, result_turn, tools_called
from choreo_agents.chat.recording import RecordedChats, remove_recording
from choreo_agents.chat.required import led, required_call
from choreo_agents.chat.speaking import Speaking
from choreo_agents.chat.thinking import answer_header, thinking_before
from choreo_agents.chat.tools import Described, Tool, ToolChoice, described_tools, own_turns, required_tools
from choreo_agents.chat.turns import thoughts_said, turn_said
from choreo_agents.models import context_of

__all__ = [
    "THOUGHT_BLOCKS",
    "ChatCall",
    "ChatRequest",
    "CompiledGuides",
    "Described",
    "RecordedChats",
    "Reuse",
    "Speaking",
    "Tool",
    "ToolChoice",
    "answer_format",
    "answer_header",
    "astreamed",
    "calls_in",
    "calls_made",
    "closed",
    "context_of",
    "count_tokens",
    "described_tools",
    "led",
    "own_turns",
    "remove_recording",
    "required_call",
    "required_tools",
    "result_turn",
    "schema_of_type",
    "streamed",
    "thinking_before",
    "thoughts_said",
    "tools_called",
    "turn_said",
]
