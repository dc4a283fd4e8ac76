"""Loads Hugging Face models and adapts them to the engine. Beside training, only this package imports transformers."""

from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.chat.format import ChatFormat
from choreo_agents.models.chat.tool_prompt import (
    Kind,
    TurnText,
    instructions,
    question,
    tool_result_turn,
    tools_format,
    tools_prompt,
)
from choreo_agents.models.chat.tools.grammar import BrokenCall, CallPart, TextPart, ToolCall
from choreo_agents.models.constraints import MakeConstraint, require_grammar
from choreo_agents.models.loader import GenerationConfigUse, LoadedModel, context_of, load_model
from choreo_agents.models.prompt_text import PromptText

__all__ = [
    "BrokenCall",
    "CallPart",
    "ChatFormat",
    "GenerationConfigUse",
    "Kind",
    "LoadedModel",
    "MakeConstraint",
    "ModelAdapter",
    "PromptText",
    "TextPart",
    "ToolCall",
    "TurnText",
    "context_of",
    "instructions",
    "load_model",
    "question",
    "require_grammar",
    "tool_result_turn",
    "tools_format",
    "tools_prompt",
]
