"""Questions about several documents, none of which has seen another (Prompt Cache, table 1), as schemas and prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self
from xml.sax.saxutils import escape, quoteattr

from choreo_agents.errors import InvalidRequestError
from choreo_agents.models import ChatFormat, PromptText
from choreo_agents.pml import Prompt, Schema
from choreo_bench.language import Problem, ProblemMessage, Task
from choreo_bench.language.synthesis import SYNTHESIS_TASKS, Parts, Synthesis
from choreo_bench.language.tasks import MultiDocument, TwoHop


@dataclass(frozen=True)
class AboutDocuments:
    """Another task, whose messages of a name are documents: each has seen the rules only."""

    name: str
    task: Task
    named: str
    """What the names of documents start with."""

    def draw(self, rng: random.Random) -> Problem:
        problem = self.task.draw(rng)
        documents = tuple(message.name for message in problem.messages if message.name.startswith(self.named))
        return replace(problem, task=self.name, branches=documents)

    def varied(self, rng: random.Random, hardness: float) -> Self:
        return replace(self, task=self.task.varied(rng, hardness))


_SEVERAL: tuple[Task, ...] = (
    AboutDocuments("one_fact", MultiDocument(unknown=0.0), "report "),
    AboutDocuments("unknown", MultiDocument(unknown=1.0), "report "),
    AboutDocuments("two_hops", TwoHop(), "notes "),
)
_MERGED = tuple(replace(task, private=0) for task in SYNTHESIS_TASKS.values() if isinstance(task, Synthesis))
"""Their branches are the documents; nobody has notes of his own."""
DOCUMENT_TASKS: Mapping[str, Task] = {task.name: task for task in (*_SEVERAL, *_MERGED)}
"""Every task by name. Its problems have documents: they are `branches` (see `Parts`)."""
GIVEN_AWAY = ("assembly", "candidates")
"""Tasks whose answer follows from what stands before the documents: these need not be read."""


@dataclass(frozen=True)
class DocumentQuestion:
    """A problem as a schema with a module for each document, and as a prompt that imports all of them.

    rules, question of all | document-1 | document-2 | ... | question      answer
    ---- the schema's own -|------------ modules ----------|-- the prompt's own --
    """

    parts: Parts
    schema: Schema
    prompt: Prompt
    """With the question, which is encoded with it."""
    documents: Prompt
    """The same without the question."""

    @classmethod
    def of(cls, problem: Problem, name: str) -> DocumentQuestion:
        """Write a problem down.

        Args:
            problem: With documents.
            name: Of the schema.

        Raises:
            ValueError: It has no documents, or one of them has seen another.
        """
        parts = Parts.of(problem)
        names = [f"document-{number}" for number in range(1, len(parts.branches) + 1)]
        documents = zip(names, parts.branches, strict=True)
        modules = [f'<module name="{document}">{_turn(branch.words)}</module>' for document, branch in documents]
        content = "".join([*map(_turn, parts.trunk), *modules])
        schema = Schema.from_text(f'<schema name={quoteattr(name)} xml:space="preserve">{content}</schema>')
        imports = "".join(f"<{name}/>" for name in names)
        question = "".join(f"<{ask.role}>{escape(ask.text)}</{ask.role}>" for ask in parts.asks)
        return cls(parts, schema, schema.prompt(imports + question), schema.prompt(imports))

    def as_text(self, chat: ChatFormat) -> PromptText:
        """The ordinary prompt: all turns, one after the other."""
        documents = [branch.words for branch in self.parts.branches]
        return PromptText.special(chat.bos) + written(chat, [*self.parts.trunk, *documents, *self.parts.asks])


def written(chat: ChatFormat, messages: Sequence[ProblemMessage]) -> PromptText:
    """Turns one after the other."""
    turns = (chat.turn(message.role, message.text, message.author) for message in messages)
    return sum(turns, PromptText())


def _turn(message: ProblemMessage) -> str:
    """The same turn in a schema, where nobody has a name of his own."""
    words = f"{message.author}: {message.text}" if message.author else message.text
    return f"<{message.role}>{escape(words)}</{message.role}>"


def require_document_tasks(names: Sequence[str]) -> list[Task]:
    """Tasks by name, all for none; raises `InvalidRequestError` for a name that no task has."""
    for name in names:
        if name not in DOCUMENT_TASKS:
            raise InvalidRequestError(f"unknown task {name!r}: use some of {', '.join(DOCUMENT_TASKS)}")
    return [task for name, task in DOCUMENT_TASKS.items() if not names or name in names]
