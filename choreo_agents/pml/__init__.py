"""Prompt Cache's markup language: schemas whose modules are encoded once, and prompts that import them."""

from choreo_agents.pml.assembling import Assembly, FreshText, PlacedPiece, compile_prompt
from choreo_agents.pml.building import Slot, assistant, module, module_of, slot, system, union, user
from choreo_agents.pml.compiler import CompiledSchema, PieceKey, SchemaPiece, compile_schema
from choreo_agents.pml.library import EncodedModule, SchemaLibrary
from choreo_agents.pml.prompt import Prompt
from choreo_agents.pml.schema import Schema
from choreo_agents.pml.views import PromptView

__all__ = [
    "Assembly",
    "CompiledSchema",
    "EncodedModule",
    "FreshText",
    "PieceKey",
    "PlacedPiece",
    "Prompt",
    "PromptView",
    "Schema",
    "SchemaLibrary",
    "SchemaPiece",
    "Slot",
    "assistant",
    "compile_prompt",
    "compile_schema",
    "module",
    "module_of",
    "slot",
    "system",
    "union",
    "user",
]
