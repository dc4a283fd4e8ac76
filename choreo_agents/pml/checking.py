"""Checker of schema and prompt files, which reports all problems in any of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from choreo_agents.errors import PMLError, PMLProblem
from choreo_agents.models import LoadedModel
from choreo_agents.pml.assembling import compile_prompt
from choreo_agents.pml.compiler import CompiledSchema, compile_schema
from choreo_agents.pml.markup.parser import parse_document
from choreo_agents.pml.markup.problems import Problems, nearest
from choreo_agents.pml.markup.reading import read_document
from choreo_agents.pml.markup.syntax import PromptTree, SchemaTree
from choreo_agents.pml.schema import Schema, resolve


def check_files(paths: Sequence[Path], model: LoadedModel | None = None) -> tuple[PMLProblem, ...]:
    """Return the problems in files, sorted by file, line and column.

    Args:
        paths: Files of schemas, and of prompts, each of which is checked against the schema that it names.
        model: Counts tokens, to find schemas, arguments and prompts that are too long; None: these are not checked.

    Raises:
        OSError: A file cannot be read.
    """
    collected: list[PMLProblem] = []
    schemas: dict[str, SchemaTree | None] = {}
    prompts: list[PromptTree] = []
    compiled: dict[str, CompiledSchema] = {}
    for path in paths:
        with _collect(collected) as problems:
            text = read_document(path, problems)
            problems.require_none()
            tree = parse_document(text, str(path), path.parent, problems)
            if isinstance(tree, PromptTree):
                prompts.append(tree)
            elif tree is not None:
                if tree.name in schemas:
                    expected = "a name that is used once"
                    problems.add(tree.place, f"another file defines schema {tree.name!r}, too", expected)
                schemas[tree.name] = None if problems.found else tree
                problems.require_none()
                if model is not None:
                    compiled[tree.name] = compile_schema(Schema(tree), model)
    for tree in prompts:
        with _collect(collected) as problems:
            if tree.schema not in schemas:
                expected = nearest(tree.schema, schemas, "the schema's file among those that are checked")
                problems.add(tree.place, f"none of these files defines schema {tree.schema!r}", expected)
            elif (schema := schemas[tree.schema]) is not None:  # else its problems are reported already
                prompt = resolve(schema, tree, problems)
                problems.require_none()
                if model is not None and tree.schema in compiled:
                    compile_prompt(compiled[tree.schema], prompt, model)
    return tuple(dict.fromkeys(sorted(collected, key=lambda problem: (problem.file, problem.line, problem.column))))


@contextmanager
def _collect(collected: list[PMLProblem]) -> Iterator[Problems]:
    """Add the problems of one file to `collected`."""
    problems = Problems()
    try:
        yield problems
        problems.require_none()
    except PMLError as error:
        collected.extend(error.problems)
