"""What an agent is told by a prompt of a schema: modules, encoded once for all agents of an engine, and its own words.

public root | modules and arguments, each where the schema puts it, words of the prompt | superstep 1: ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

from choreo_agents.engine import Engine, Prefill
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import ContextLengthError
from choreo_agents.graph.view.bound_engine import BoundEngine
from choreo_agents.graph.view.placed_view import PlacedView
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml import CompiledSchema, FreshText, Prompt, Schema, compile_prompt, compile_schema
from choreo_agents.pml.library import ModuleCache
from choreo_agents.pml.markup.syntax import Import, Path, PromptTree, SchemaTree, modules_of


@dataclass(frozen=True)
class PromptPart:
    """A part of a prompt in words."""

    text: str
    role: str | None
    """Of a turn; None: it is an instruction."""
    is_own: bool
    """Whether no module holds it: it is an argument, or the prompt's own."""
    confidential: bool
    """Whether its module is."""


class ImportedPrompt:
    """A prompt for one engine's agents, as they read it. Nothing is encoded before it is first read.

    Args:
        engine: Encodes it.
        prompt: What to read.
        public: The public root that comes before it.

    Raises:
        PMLError: Its schema is longer than the model's context, or it is, or an argument than its slot.
        ContextLengthError: With the public root it is longer than the model's context.
    """

    def __init__(self, engine: Engine, prompt: Prompt, public: str | None) -> None:
        self._engine = engine
        self._schema = prompt.schema.name
        schema, self._module_cache = engine.kv.get_or_create(_Modules, engine).known(prompt.schema)
        self._assembly = compile_prompt(schema, prompt, engine.model)
        self._decode = engine.model.decode
        self._closing = tuple(engine.model.encode(engine.chat.user.after)) if engine.chat.merges is not None else ()
        root = 0 if public is None else len(engine.model.encode(engine.chat.root(public)))
        most = engine.model.adapter.max_positions
        if root + self._assembly.end > most:
            raise ContextLengthError(
                f"the public root takes {root} positions and the prompt of schema {self._schema!r} "
                f"{self._assembly.end}, the model's context has {most}: import less, or say less to everybody"
            )

    @cached_property
    def told(self) -> Sequence[PromptPart]:
        """What it says, in the order of positions; nothing where a slot has no argument."""

        def told(tokens: Sequence[int], role: str | None, is_own: bool, confidential: bool) -> PromptPart:
            return PromptPart(self._decode([*tokens], special=False).strip(), role, is_own, confidential)

        cached, fresh = self._assembly.cached, self._assembly.fresh
        placed = [(p.start, told(p.tokens, None, False, p.confidential)) for p in cached if p.slot is None]
        placed += [(t.offset, told(t.tokens, t.role, t.kind != "module", t.confidential)) for t in fresh]
        return [each for _, each in sorted(placed, key=lambda one: one[0]) if each.text]

    def texts(self, owner: str) -> Mapping[str, set[tuple[int, ...]]]:
        """What it says, by the name of the module, or of the private context that its own words belong to: `owner`."""
        found: dict[str, set[tuple[int, ...]]] = {}
        for piece in self._assembly.cached:
            found.setdefault(name_of(self._schema, piece.module), set()).add(tuple(piece.tokens))
        for text in self._assembly.fresh:
            found.setdefault(self._author(text, owner), set()).add(tuple(text.tokens))
        # What closes a user's turn apart from its words says nothing of anybody: it is a joint like any other.
        return {name: said - {self._closing} for name, said in found.items()}

    def _author(self, text: FreshText, owner: str) -> str:
        return owner if text.kind != "module" else name_of(self._schema, text.module)

    async def lease(self) -> Leases:
        """Bring its modules to the device, or encode them, and take a lease of each for one call.

        If the awaiting task is cancelled, the leases are given back.
        """
        done: Future[Leases] = Future()
        working = asyncio.to_thread(lambda: done.set_result(self._leased()))
        try:
            await working
        except asyncio.CancelledError:
            # Its thread goes on.
            done.add_done_callback(lambda ready: ready.result().release())
            raise
        return done.result()

    def _leased(self) -> Leases:
        with self._module_cache.brought(placed.key for placed in self._assembly.cached) as handles:
            return self._engine.kv.lease(list(handles.values()))

    async def place(
        self, view: PlacedView, modules: Sequence[MessageHandle], owner: str, bound: BoundEngine, adapter: str | None
    ) -> None:
        """Append it to a view, and encode what no module holds: each text with what stands before it in sight.

        Args:
            view: With nothing but the public root in it.
            modules: As `lease` gives them.
            owner: The name of the private context that arguments and words of the prompt belong to.
            bound: Encodes them, by the reader's `adapter`.
        """
        start, before, open_end = view.end, view.copy(), self._assembly.open_end
        # A user's turn at its end stays open: others may go on in it.
        end = self._assembly.end if open_end is None else open_end
        cached = zip(self._assembly.cached, modules, strict=True)
        placed = [(piece.start, handle) for piece, handle in cached if piece.start < end]
        for text in self._assembly.fresh:
            if text.offset >= end:
                continue
            seen = before.copy()
            for offset, handle in placed:
                if offset < text.offset:
                    seen.add(handle, start + offset)
            author, role, at = self._author(text, owner), text.role or "system", start + text.offset
            said = text.tokens, seen.handles, [*seen.offsets], at, author, role, text.confidential
            [made] = await bound.ask_for([Prefill(*said, adapter=adapter)])
            placed = sorted([*placed, (text.offset, made)], key=lambda each: each[0])
        for offset, handle in placed:
            view.add(handle, start + offset)
        # Where an argument is shorter than its slot, the rest of it stays free.
        view.end = start + end
        view.turn = "closed" if open_end is None else "open"


class _Modules:
    """The modules that a tenant's agents import on one engine. May be used from any thread.

    A schema that says something else under a known name is another schema: graphs of both may run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._schemas: dict[SchemaTree, tuple[CompiledSchema, ModuleCache]] = {}
        self._lock = threading.Lock()

    def known(self, tree: SchemaTree) -> tuple[CompiledSchema, ModuleCache]:
        """What a schema is to the model, and what has its modules.

        Raises:
            PMLError: It is longer than the model's context.
        """
        with self._lock:
            if tree not in self._schemas:
                schema, module_cache = compile_schema(Schema(tree), self._engine.model), ModuleCache(self._engine)
                module_cache.know(tree.name, schema.cached_pieces())
                self._schemas[tree] = schema, module_cache
            return self._schemas[tree]


def name_of(schema: str, module: Path) -> str:
    """What lineage and audits call a module: `travel/plan/miami`."""
    return "/".join([schema, *module])


def confidential_modules(prompt: Prompt) -> tuple[str, ...]:
    """The names of the confidential modules that a prompt imports, and of all modules that it imports inside them."""
    marked = [path for path, module in modules_of(prompt.schema) if module.confidential]
    return tuple(
        name_of(prompt.schema.name, path)
        for path in prompt.imports
        if any(path[: len(each)] == each for each in marked)
    )


def has_own_words(prompt: Prompt) -> bool:
    """Whether a prompt says anything that stands in no module: arguments, text or turns."""
    return _says(prompt.tree)


def _says(tree: PromptTree | Import) -> bool:
    return bool(tree.arguments) or any(not isinstance(each, Import) or _says(each) for each in tree.children)
