"""Prompt Cache's markup language: schemas whose modules are encoded once, and prompts that import them."""

from choreo_agents.pml.assembling import Assembly, FreshText, PromptView, compile_prompt
from choreo_agents.pml.building import Slot, assistant, module, module_of, slot, system, union, user
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
