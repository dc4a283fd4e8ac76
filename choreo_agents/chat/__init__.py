"""Chat messages in, chat messages out: what stands between LangChain's messages and the turns of a model.

Read `tools` (what an agent may call), `speech` (what its tokens say), `speaking` (the same as it comes), `history`
(what was called, as it is told again).
"""

from choreo_agents.chat.history import (
    CALL_BLOCKS,
    THOUGHT_BLOCKS,
    calls_in,
    calls_made,
    result_turn,
    tools_called,
)
from choreo_agents.chat.speaking import Speaking, Spoken
from choreo_agents.chat.tools import Described, Tool, ToolChoice, described_tools, must_call, own_turns

__all__ = [
    "CALL_BLOCKS",
    "THOUGHT_BLOCKS",
    "Described",
    "Speaking",
    "Spoken",
    "Tool",
    "ToolChoice",
    "calls_in",
    "calls_made",
    "described_tools",
    "must_call",
    "own_turns",
    "result_turn",
    "tools_called",
]
