"""Calls of tools as text: how a family of models writes them, and how they are read as they come.

Read `calls` (what is said), `grammar` (how one family writes it), `reading` (back again), `format` (with what stands
around it in a conversation).
"""

from choreo_agents.models.chat.tools.calls import BrokenCall, CallPart, SaidWords, ToolCall
from choreo_agents.models.chat.tools.format import ResultFormat, ToolsFormat
from choreo_agents.models.chat.tools.grammar import CallGrammar
from choreo_agents.models.chat.tools.reading import ToolCallReader

__all__ = [
    "BrokenCall",
    "CallGrammar",
    "CallPart",
    "ResultFormat",
    "SaidWords",
    "ToolCall",
    "ToolCallReader",
    "ToolsFormat",
]
