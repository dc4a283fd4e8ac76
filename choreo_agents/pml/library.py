"""Schemas whose modules are encoded once, and prompts that are assembled from them (Prompt Cache, section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine
from choreo_agents.errors import InvalidRequestError
from choreo_agents.pml.answering import Answering
from choreo_agents.pml.assembling import Assembly, compile_prompt
from choreo_agents.pml.compiler import CompiledSchema, compile_schema
from choreo_agents.pml.prompt import Prompt
from choreo_agents.pml.schema import Schema
from choreo_agents.pml.shelf import Budgets, OnReady, Shelf
from choreo_agents.pml.slots import Place, Recipe
from choreo_agents.pml.views import PromptView, begin_view, encode_fresh, release_all


@dataclass(frozen=True)
class EncodedModule:
    """Where one piece of a schema is: a text between two modules or parameters, or a parameter's placeholders."""

    key: str
    """`plan/miami#0`: the first piece of a module; `#0`: of the schema."""
    module: tuple[str, ...]
    tokens: int
    bytes: int
    """Of its KV."""
    place: Place
    pinned: bool


class SchemaLibrary(Answering):
    """Encoded modules of schemas, for prompts on one engine. May be used from any thread and event loop.

    Modules live on the device, on the host, in a folder, or nowhere until they are next imported; what is imported is
    brought to the device, and of what does not fit a budget the longest unused leaves. Leases of the library are of no
    `engine.scope()`. It belongs to the tenant of the engine that it is given; so do its files.

    Args:
        engine: Encodes and answers.
        folder: Outlives the engine: each model has a folder in it, named by its fingerprint, and each tenant one in
            that. Processes may share it. None: modules are encoded by every process.
        device_bytes: Of modules in the KV memory; None: all of it, which they share with other messages.
        host_bytes: Of modules in the engine's host memory; None: all of it.
        disk_bytes: Of files.
    """

    @refuses_unknown()
    def __init__(
        self,
        engine: Engine,
        folder: str | Path | None = None,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        disk_bytes: int = 1 << 34,
    ) -> None:
        _require_bytes(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes)
        super().__init__(engine)
        store = None if folder is None else engine.kv.store(folder, disk_bytes)
        self._shelf = Shelf(engine, store, Budgets(device_bytes, host_bytes))
        self._compiled: dict[str, CompiledSchema] = {}

    @property
    def schemas(self) -> tuple[str, ...]:
        """The names of registered schemas."""
        return tuple(self._compiled)

    def compiled(self, schema: str) -> CompiledSchema:
        """A schema's pieces and positions for the engine's model.

        Raises:
            InvalidRequestError: There is no such schema.
        """
        if schema not in self._compiled:
            known = ", ".join(map(repr, self._compiled)) or "none"
            raise InvalidRequestError(f"schema {schema!r} is not registered, but {known}: call register() first")
        return self._compiled[schema]

    def register(
        self,
        schema: Schema,
        *,
        encode: Literal["eager", "lazy"] = "lazy",
        placeholder: int | None = None,
        on_ready: OnReady = lambda _: None,
    ) -> CompiledSchema:
        """Know a schema; one of that name that was known before is replaced, and what both have in common kept.

        Args:
            schema: What prompts import from.
            encode: `"eager"`: encode every module now that is neither in memory nor in a file, and write it; `"lazy"`:
                when a prompt imports it.
            placeholder: The token that parameters are encoded with (see `compile_schema`).
            on_ready: Is told how many more of the schema's `cached_tokens` are ready.

        Raises:
            PMLError: The schema is longer than the model's context.
            OSError: What was encoded cannot be written.
        """
        compiled = compile_schema(schema, self._engine.model, placeholder=placeholder)
        before = self._compiled.get(schema.name)
        gone = set() if before is None else {_key(before, piece.key) for piece in before.cached_pieces()}
        recipes = {recipe.key: recipe for recipe in _recipes(compiled)}
        self._shelf.add(recipes.values())
        self._shelf.remove(gone - recipes.keys())
        self._compiled[schema.name] = compiled
        if encode == "eager":
            missing = [key for key in recipes if self._shelf.place(key)[0] == "nowhere"]
            on_ready(sum(len(recipe.tokens) for key, recipe in recipes.items() if key not in missing))
            with self._shelf.brought(missing, on_ready, patient=True):
                pass
        return compiled

    def forget(self, schema: str) -> None:
        """Give a schema up, with all that is encoded of it; its files stay."""
        self._shelf.remove(_named(self.compiled(schema), None))
        del self._compiled[schema]

    def load(self, schema: str, modules: Iterable[str] | None = None, on_ready: OnReady = lambda _: None) -> None:
        """Bring modules to the device, from files if there are any.

        Args:
            schema: Whose.
            modules: Their names, with `/` between inner ones'; None: all, the schema's own text too.
            on_ready: Is told of progress in tokens.
        """
        with self._shelf.brought(_named(self.compiled(schema), modules), on_ready, patient=True) as handles:
            self._engine.kv.restore(list(handles.values()))

    def evict(self, schema: str, modules: Iterable[str] | None = None, *, files: bool = False) -> None:
        """Give modules up on the device and the host; with `files`, on disk, too. Pinned ones stay."""
        self._shelf.evict(_named(self.compiled(schema), modules), files=files)

    def pin(self, schema: str) -> None:
        """Bring all of a schema to the device, and keep it there."""
        self._shelf.pin(_named(self.compiled(schema), None))

    def unpin(self, schema: str) -> None:
        """Undo `pin`."""
        self._shelf.unpin(_named(self.compiled(schema), None))

    def modules(self, schema: str) -> list[EncodedModule]:
        """Where everything of a schema is."""
        return _encoded(self.compiled(schema), self._shelf, self._engine.model.adapter.geometry.bytes_per_token)

    def prompt(self, schema: str, pml: str) -> Prompt:
        """Read a prompt of a registered schema.

        Raises:
            PMLError: With all that is wrong in it.
        """
        return self.compiled(schema).schema.prompt(pml)

    def _assembled(self, prompts: Sequence[Prompt], *, lazy: bool) -> list[PromptView]:
        compiled = [self.compiled(prompt.schema.name) for prompt in prompts]
        assemblies = [compile_prompt(*each, self._engine.model) for each in zip(compiled, prompts, strict=True)]
        wanted = [_key(each, placed.key) for each in assemblies for placed in each.cached]
        views: list[PromptView] = []
        try:
            with self._shelf.brought(wanted) as handles:
                for each in assemblies:
                    own = {placed.key: handles[_key(each, placed.key)] for placed in each.cached}
                    views.append(begin_view(self._engine, each, own))
            encode_fresh(self._engine, views, assemblies, lazy=lazy)
        except BaseException:
            release_all(views)
            raise
        return views

    def flush(self) -> None:
        """Wait until all files are written.

        Raises:
            OSError: Something could not be.
        """
        self._shelf.flush()

    def close(self) -> None:
        """Write what is to be written, and give everything up but files; the engine stays open."""
        self._shelf.close()
        self._compiled.clear()

    def __enter__(self) -> SchemaLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_bytes(**budgets: int | None) -> None:
    for name, budget in budgets.items():
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise InvalidRequestError(f"{name} must be a number of bytes, not {budget!r}")


def _encoded(compiled: CompiledSchema, shelf: Shelf, token_bytes: int) -> list[EncodedModule]:
    found: list[EncodedModule] = []
    for piece in compiled.cached_pieces():
        place, pinned = shelf.place(_key(compiled, piece.key))
        tokens = len(piece.tokens)
        found.append(EncodedModule(piece.key, piece.module, tokens, tokens * token_bytes, place, pinned))
    return found


def _named(compiled: CompiledSchema, modules: Iterable[str] | None) -> list[str]:
    """The keys of modules and all that is in them."""
    if modules is None:
        return [_key(compiled, piece.key) for piece in compiled.cached_pieces()]
    paths = [tuple(name.split("/")) for name in modules]
    known = {piece.module for piece in compiled.pieces.values()}
    for path in paths:
        if not any(each[: len(path)] == path for each in known):
            raise InvalidRequestError(f"schema {compiled.schema.name!r} has no module {'/'.join(path)!r}")
    return [
        _key(compiled, piece.key)
        for piece in compiled.cached_pieces()
        if any(piece.module[: len(path)] == path for path in paths)
    ]


def _key(owner: CompiledSchema | Assembly, piece: str) -> str:
    """What the shelf calls a piece."""
    name = owner.schema.name if isinstance(owner, CompiledSchema) else owner.prompt.schema.name
    return f"{name}:{piece}"


def _recipes(compiled: CompiledSchema) -> Iterator[Recipe]:
    """What is to be encoded once, parents first."""
    for piece in compiled.cached_pieces():
        author = "/".join([compiled.schema.name, *piece.module])
        parents = tuple(_key(compiled, parent) for parent in piece.parents)
        yield Recipe(_key(compiled, piece.key), piece.tokens, piece.start, parents, author, piece.confidential)
