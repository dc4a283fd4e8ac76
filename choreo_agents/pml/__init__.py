"""Prompt Cache's markup language: schemas whose modules are encoded once, and prompts that import them."""

from choreo_agents.pml.assembling import Assembly, FreshText, PromptView, compile_prompt
from choreo_agents.pml.compiler import CompiledSchema, compile_schema
from choreo_agents.pml.library import SchemaLibrary
from choreo_agents.pml.schema import Prompt, Schema

__all__ = [
    "Assembly",
    "CompiledSchema",
    "FreshText",
    "Prompt",
    "PromptView",
    "Schema",
    "SchemaLibrary",
    "compile_prompt",
    "compile_schema",
]
