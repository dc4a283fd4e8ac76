"""A prompt of a schema as an agent reads it: its modules, encoded once per engine, and its own text.

public root | modules and arguments, each where the schema puts it, text of the prompt | superstep 1: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import ContextLengthError
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml import FreshText, Prompt, Schema, compile_prompt, compile_schema
from choreo_agents.pml.library import EncodedSchema
from choreo_agents.pml.markup.syntax import Import, Path, PromptTree, SchemaTree, modules_of

if TYPE_CHECKING:
    from choreo_agents.graph.agent import Agent


class ImportedPrompt:
    """A prompt of a schema for the agents of one engine. Nothing is encoded before it is first read.

    Args:
        engine: The engine that encodes it.
        prompt: The prompt.
        public: Text of the public root before it.

    Raises:
        PMLError: The schema or the prompt is longer than the model's context, or an argument longer than its slot.
        ContextLengthError: With the public root it is longer than the model's context.
    """

    def __init__(self, engine: Engine, prompt: Prompt, public: str | None) -> None:
        self._engine = engine
        self._schema = prompt.schema.name
        schemas = engine.kv.get_or_create(_EncodedSchemas)
        if prompt.schema not in schemas:
            compiled = compile_schema(Schema(prompt.schema), engine.model)
            schemas.setdefault(prompt.schema, EncodedSchema(engine, compiled))
        self._encoded = schemas[prompt.schema]
        self._assembly = compile_prompt(self._encoded.compiled, prompt, engine.model)
        self._closing = tuple(engine.model.encode(engine.chat.user.after)) if engine.chat.merges is not None else ()
        root = 0 if public is None else len(engine.model.encode(engine.chat.root(public)))
        most = engine.model.adapter.max_positions
        if root + self._assembly.end > most:
            raise ContextLengthError(
                f"the public root takes {root} positions and the prompt of schema {self._schema!r} "
                f"{self._assembly.end}, but the model's context is {most}: import less, or shorten the public root"
            )

    @cached_property
    def parts(self) -> Sequence[tuple[str, FreshText]]:
        """Its parts, each with its text, in the order of positions and without empty slots; cached ones, too."""
        whole = [piece for piece in self._assembly.cached if piece.slot is None]
        cached = [FreshText(p.tokens, p.start, None, "module", p.module, p.confidential) for p in whole]
        placed = sorted([*cached, *self._assembly.fresh], key=lambda part: part.offset)
        texts = ((self._engine.model.decode([*part.tokens], special=False).strip(), part) for part in placed)
        return [(text, part) for text, part in texts if text]

    def texts(self, owner: str) -> Mapping[str, set[tuple[int, ...]]]:
        """Return its token sequences by module, or, for its own text, by the private context `owner`."""
        texts: dict[str, set[tuple[int, ...]]] = {}
        for piece in self._assembly.cached:
            texts.setdefault(name_of(self._schema, piece.module), set()).add(tuple(piece.tokens))
        for text in self._assembly.fresh:
            texts.setdefault(self._author(text, owner), set()).add(tuple(text.tokens))
        # The tokens that close a user's turn carry nothing private: they are a separator like any other.
        return {name: tokens - {self._closing} for name, tokens in texts.items()}

    def _author(self, text: FreshText, owner: str) -> str:
        return owner if text.kind != "module" else name_of(self._schema, text.module)

    async def lease(self) -> Leases:
        """Lease its modules for one call; the first one that reads them encodes them."""
        keys = [piece.key for piece in self._assembly.cached]
        # On a thread, since new leases may have to wait for the tenant's rate limit. They are the schema's: if the
        # awaiting task is cancelled, the call has taken none.
        return self._engine.kv.lease(await asyncio.to_thread(self._encoded.handles, keys))

    async def place(
        self, view: PlacedView, modules: Sequence[MessageHandle], owner: str, bound: BoundEngine, adapter: str | None
    ) -> None:
        """Append it to a view and encode what no module holds, each text behind all that stands before it.

        Args:
            view: The view, with nothing but the public root in it.
            modules: The leased handles, from `lease`.
            owner: The private context that arguments and the prompt's own text belong to.
            bound: The reader's engine, which encodes them with the reader's `adapter`.
        """
        start, before, open_end = view.end, view.copy(), self._assembly.open_end
        # A user's turn at its end stays open: later messages may continue it.
        end = self._assembly.end if open_end is None else open_end
        cached = zip(self._assembly.cached, modules, strict=True)
        placed = [(piece.start, handle) for piece, handle in cached if piece.start < end]
        for text in self._assembly.fresh:
            if text.offset >= end:
                continue
            prefix = before.copy()
            for offset, handle in placed:
                if offset < text.offset:
                    prefix.add(handle, start + offset)
            author, role, at = self._author(text, owner), text.role or "system", start + text.offset
            arguments = text.tokens, prefix.handles, [*prefix.offsets], at, author, role, text.confidential
            [encoded] = await bound.prefill_shared([Prefill(*arguments, adapter=adapter)])
            placed = sorted([*placed, (text.offset, encoded)], key=lambda item: item[0])
        for offset, handle in placed:
            view.add(handle, start + offset)
        # Positions that an argument leaves free in its slot stay unused.
        view.end = start + end
        view.turn = "closed" if open_end is None else "open"


class _EncodedSchemas(dict[SchemaTree, EncodedSchema]):
    """Schemas that a tenant's agents import from, by content: graphs with different schemas of one name may run side
    by side."""


class _PromptsByAgent(WeakKeyDictionary["Agent", ImportedPrompt]):
    """Prompts of schemas by agent, on the engine of one tenant."""


def imported_by(agent: Agent, engine: Engine | None) -> ImportedPrompt | None:
    """Return an agent's prompt of a schema as an engine encodes it; None: it has none.

    Raises:
        PMLError, ContextLengthError: It does not fit the engine's model.
    """
    if agent.schema_prompt is None or engine is None:
        return None
    kept = engine.kv.get_or_create(_PromptsByAgent)
    if agent not in kept:
        kept[agent] = ImportedPrompt(engine, agent.schema_prompt, agent.shared_system)
    return kept[agent]


def name_of(schema: str, module: Path) -> str:
    """Return a module's name in lineage and audits: `travel/plan/miami`."""
    return "/".join([schema, *module])


def confidential_modules(prompt: Prompt) -> tuple[str, ...]:
    """Return the names of the confidential modules that a prompt imports, and of all modules that it imports inside
    them."""
    marked = [path for path, module in modules_of(prompt.schema) if module.confidential]
    private = (path for path in prompt.imports if any(path[: len(prefix)] == prefix for prefix in marked))
    return tuple(name_of(prompt.schema.name, path) for path in private)


def has_own_words(tree: PromptTree | Import) -> bool:
    """Return whether a prompt has text outside of modules: arguments, text or turns."""
    return bool(tree.arguments) or any(not isinstance(child, Import) or has_own_words(child) for child in tree.children)
