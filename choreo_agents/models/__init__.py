"""The only room that knows transformers: loading, the attention hook, chat formats, the embedded model."""

from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.chat import (
    BrokenCall,
    CallPart,
    ChatFormat,
    Kind,
    Said,
    SaidWords,
    ToolCall,
    instructions,
    question,
    result_said,
    tools_format,
    tools_told,
)
from choreo_agents.models.framed import FramedText
from choreo_agents.models.guides import MakeGuide, require_grammar
from choreo_agents.models.loader import GenerationConfigUse, LoadedModel, context_of, load_model

__all__ = [
    "BrokenCall",
    "CallPart",
    "ChatFormat",
    "FramedText",
    "GenerationConfigUse",
    "Kind",
    "LoadedModel",
    "MakeGuide",
    "ModelAdapter",
    "Said",
    "SaidWords",
    "ToolCall",
    "context_of",
    "instructions",
    "load_model",
    "question",
    "require_grammar",
    "result_said",
    "tools_format",
    "tools_told",
]
