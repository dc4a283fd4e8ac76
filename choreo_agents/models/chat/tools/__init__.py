"""Calls of tools as text: how a family of models writes them, and how they are read as they come.

Read `grammar` (what is said, and how one family writes it), `reading` (back again), `format` (with what stands around
it in a conversation).
"""

from choreo_agents.models.chat.tools.grammar import BrokenCall, CallPart, TextPart, ToolCall

__all__ = ["BrokenCall", "CallPart", "TextPart", "ToolCall"]
