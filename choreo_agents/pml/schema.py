"""`Schema`: what a user reads, writes, builds and prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from choreo_agents.errors import InvalidRequestError
from choreo_agents.pml.building import Content, Writer, build
from choreo_agents.pml.markup.parser import parse_document, parse_prompt
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.sources import read_document
from choreo_agents.pml.markup.syntax import PromptTree, SchemaTree
from choreo_agents.pml.markup.writer import write_schema
from choreo_agents.pml.prompt import Prompt, resolve


@dataclass(frozen=True)
class Schema:
    """Modules of text that are encoded once, and that prompts import (Prompt Cache, section 3.2).

    Schemas are equal if they say the same.
    """

    tree: SchemaTree

    def __post_init__(self) -> None:
        if not isinstance(self.tree, SchemaTree):
            raise InvalidRequestError(
                f"{self.tree!r:.60} was not read: Schema.from_text(...) or Schema.from_file(...) reads it"
            )

    def __repr__(self) -> str:
        return f"Schema({self.tree.name})"

    @classmethod
    def from_file(cls, path: str | Path) -> Schema:
        """Read a schema; what it includes with `src` is looked for below its folder.

        Raises:
            PMLError: With all that is wrong in it. OSError: There is no such file.
        """
        path = Path(path)
        return cls.from_text(_read(path), source=str(path), folder=path.parent)

    @classmethod
    def from_text(cls, text: str, *, source: str = "<schema>", folder: str | Path | None = None) -> Schema:
        """Read a schema from text.

        Args:
            text: The `<schema>` element.
            source: What errors call it.
            folder: Below which `src` finds files; None: it may not be used.

        Raises:
            PMLError: With all that is wrong in it.
        """
        problems = Problems()
        tree = parse_document(text, source, None if folder is None else Path(folder), problems, ("schema",))
        problems.require_none()
        assert isinstance(tree, SchemaTree)
        return cls(tree)

    @classmethod
    def from_python(cls, name: str, content: Content | Writer, *, scaffolds: Iterable[Iterable[str]] = ()) -> Schema:
        """Build a schema from texts, modules, unions and turns (see `building`).

        Raises:
            PMLError: With all that is wrong in it.
        """
        return cls(build(name, content, scaffolds))

    @property
    def name(self) -> str:
        return self.tree.name

    @property
    def scaffolds(self) -> tuple[tuple[str, ...], ...]:
        """Sets of modules that are encoded together, each as its names with `/` between."""
        return self.tree.scaffolds

    def to_pml(self) -> str:
        """The schema as PML: reading it again gives an equal one. Files that it includes are written into it."""
        return write_schema(self.tree)

    def prompt(self, pml: str, *, source: str = "<prompt>") -> Prompt:
        """Read a prompt and check it against this schema.

        Args:
            pml: A `<prompt>` element, or only what stands in one.
            source: What errors call it.

        Raises:
            PMLError: With all that is wrong in it.
        """
        problems = Problems()
        tree = parse_prompt(pml, source, problems, schema=self.name)
        prompt = resolve(self.tree, tree, problems) if isinstance(tree, PromptTree) else None
        problems.require_none()
        assert prompt is not None
        return prompt

    def prompt_file(self, path: str | Path) -> Prompt:
        """Read a prompt from a file; raises as `prompt` does, and `OSError`."""
        return self.prompt(_read(Path(path)), source=str(path))


def _read(path: Path) -> str:
    problems = Problems()
    text = read_document(path, problems)
    problems.require_none()
    return text
