"""Checks files of schemas and prompts together: all that is wrong in any of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from choreo_agents.errors import PMLError, PMLProblem
from choreo_agents.models import LoadedModel
from choreo_agents.pml.assembling import compile_prompt
from choreo_agents.pml.compiler import CompiledSchema, compile_schema
from choreo_agents.pml.markup.parser import parse_document
from choreo_agents.pml.markup.problems import Problems, nearest
from choreo_agents.pml.markup.sources import read_document
from choreo_agents.pml.markup.syntax import PromptTree, SchemaTree
from choreo_agents.pml.prompt import resolve
from choreo_agents.pml.schema import Schema


def check_files(paths: Sequence[Path], model: LoadedModel | None = None) -> tuple[PMLProblem, ...]:
    """What is wrong in these files, by file, line and column.

    Args:
        paths: Of schemas, and of prompts, each of which is checked against that of these schemas which it names.
        model: Counts tokens, so that long schemas, arguments and prompts are found too; None: they are not.

    Raises:
        OSError: A file cannot be read.
    """
    problems = Problems()
    schemas: dict[str, SchemaTree | None] = {}
    prompts: list[PromptTree] = []
    compiled: dict[str, CompiledSchema] = {}
    for path in paths:
        own = Problems()
        text = read_document(path, own)
        tree = None if own.found else parse_document(text, str(path), path.parent, own)
        if isinstance(tree, SchemaTree):
            if tree.name in schemas:
                own.add(tree.place, f"another of these files is schema {tree.name!r}", "a name that is used once")
            schemas[tree.name] = None if own.found else tree
            if model is not None and not own.found:
                try:
                    compiled[tree.name] = compile_schema(Schema(tree), model)
                except PMLError as error:
                    own.found.extend(error.problems)
        elif tree is not None:
            prompts.append(tree)
        problems.found.extend(own.found)
    for prompt in prompts:
        _check_prompt(prompt, schemas, compiled, problems, model)
    return tuple(dict.fromkeys(sorted(problems.found, key=lambda each: (each.file, each.line, each.column))))


def _check_prompt(
    tree: PromptTree,
    schemas: dict[str, SchemaTree | None],
    compiled: dict[str, CompiledSchema],
    problems: Problems,
    model: LoadedModel | None,
) -> None:
    if tree.schema not in schemas:
        message = f"none of these files is schema {tree.schema!r}"
        problems.add(
            tree.place, message, nearest(tree.schema, schemas, "the schema's file among those that are checked")
        )
        return
    schema = schemas[tree.schema]
    if schema is None:
        return  # what is wrong there has been said
    own = Problems()
    prompt = resolve(schema, tree, own)
    problems.found.extend(own.found)
    if model is not None and not own.found and tree.schema in compiled:
        try:
            compile_prompt(compiled[tree.schema], prompt, model)
        except PMLError as error:
            problems.found.extend(error.problems)
