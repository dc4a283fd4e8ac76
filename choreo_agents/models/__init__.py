"""The only room that knows transformers: loading, the attention hook, chat formats, the embedded model."""

from choreo_agents.models.adapter import ModelAdapter
from choreo_agents.models.chat import ChatFormat, Kind, Said, instructions, question
from choreo_agents.models.framed import FramedText
from choreo_agents.models.guides import MakeGuide, require_grammar
from choreo_agents.models.loader import GenerationConfigUse, LoadedModel, load_model

__all__ = [
    "ChatFormat",
    "FramedText",
    "GenerationConfigUse",
    "Kind",
    "LoadedModel",
    "MakeGuide",
    "ModelAdapter",
    "Said",
    "instructions",
    "load_model",
    "question",
    "require_grammar",
]
