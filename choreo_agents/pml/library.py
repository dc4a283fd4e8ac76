"""Schemas whose modules are encoded once, and prompts that are assembled from them (Prompt Cache, section 3)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine, StreamedToken
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml.assembling import PromptView, compile_prompt, encoded_view
from choreo_agents.pml.compiler import CompiledSchema, PieceKey, compile_schema
from choreo_agents.pml.schema import Prompt, Schema
from choreo_agents.pml.shelf import Place, Shelf, written
from choreo_agents.sampling import Sampling


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


class SchemaLibrary:
    """Encoded modules of schemas, for prompts on one engine. May be used from any thread and event loop.

    Modules live in the engine's memories, in a folder, or nowhere until they are next imported; what is imported is
    brought to the device. Leases of the library are of no `engine.scope()`. It belongs to the tenant of the engine that
    it is given; so do its files.

    Args:
        engine: Encodes and answers.
        folder: Outlives the engine: each model has a folder in it, named by its fingerprint, and each tenant one in
            that. Processes may share it. None: modules are encoded by every process.
        disk_bytes: Of files.
    """

    @refuses_unknown()
    def __init__(self, engine: Engine, folder: str | Path | None = None, *, disk_bytes: int = 1 << 34) -> None:
        if isinstance(disk_bytes, bool) or not isinstance(disk_bytes, int) or disk_bytes < 0:
            raise InvalidRequestError(f"disk_bytes must be a number of bytes, not {disk_bytes!r}")
        self.engine = engine
        """That encodes and answers."""
        store = None if folder is None else engine.kv.store(folder, disk_bytes)
        # A twin that re-encodes text has nothing to keep.
        self._kept = engine.kv.kept_in(store if engine.method == "choreo" else None)
        self._known: dict[str, tuple[CompiledSchema, Shelf]] = {}
        self._lock = threading.Lock()
        """Of what is known and what shelves hold of it: both change together."""

    @property
    def schemas(self) -> tuple[str, ...]:
        """The names of registered schemas."""
        return tuple(self._known)

    def compiled(self, schema: str) -> CompiledSchema:
        """A schema's pieces and positions for the engine's model.

        Raises:
            InvalidRequestError: There is no such schema.
        """
        return self._find(schema)[0]

    def register(self, schema: Schema, *, encode: Literal["eager", "lazy"] = "lazy") -> CompiledSchema:
        """Know a schema; one of that name that was known before is replaced, and what both have in common kept.

        Args:
            schema: What prompts import from.
            encode: `"eager"`: encode every module now that is neither in memory nor in a file, and write it; `"lazy"`:
                when a prompt imports it.

        Raises:
            PMLError: The schema is longer than the model's context.
            OSError: What was encoded cannot be written.
        """
        compiled = compile_schema(schema, self.engine.model)
        with self._lock:
            _, shelf = self._known.get(schema.name) or (compiled, Shelf(self.engine, self._kept))
            shelf.know(schema.name, compiled.cached_pieces())
            self._known[schema.name] = compiled, shelf
        if encode == "eager":
            missing = [piece.key for piece in compiled.cached_pieces() if shelf.place(piece.key)[0] == "nowhere"]
            with shelf.brought(missing, patient=True):
                pass
        return compiled

    def forget(self, schema: str) -> None:
        """Give a schema up, with all that is encoded of it; its files stay."""
        _, shelf = self._find(schema)
        with self._lock:
            self._known.pop(schema, None)
            shelf.know(schema, ())

    def load(self, schema: str, modules: Iterable[str] | None = None) -> None:
        """Bring modules to the device, from files if there are any.

        Args:
            schema: Whose.
            modules: Their names, with `/` between inner ones'; None: all, the schema's own text too.
        """
        compiled, shelf = self._find(schema)
        with shelf.brought(_named(compiled, modules), patient=True) as handles:
            self.engine.kv.restore(list(handles.values()))

    def evict(self, schema: str, modules: Iterable[str] | None = None, *, files: bool = False) -> None:
        """Give modules up on the device and the host; with `files`, on disk, too. Pinned ones stay."""
        compiled, shelf = self._find(schema)
        shelf.evict(_named(compiled, modules), files=files)

    def pin(self, schema: str) -> None:
        """Bring all of a schema to the device, and keep it there."""
        self._find(schema)[1].pin()

    def unpin(self, schema: str) -> None:
        """Undo `pin`."""
        self._find(schema)[1].unpin()

    def modules(self, schema: str) -> list[EncodedModule]:
        """Where everything of a schema is."""
        compiled, shelf = self._find(schema)
        token_bytes = self.engine.model.adapter.geometry.bytes_per_token
        return [
            EncodedModule(piece.key, piece.module, n := len(piece.tokens), n * token_bytes, *shelf.place(piece.key))
            for piece in compiled.cached_pieces()
        ]

    def prompt(self, schema: str, pml: str) -> Prompt:
        """Read a prompt of a registered schema.

        Raises:
            PMLError: With all that is wrong in it.
        """
        return self.compiled(schema).schema.prompt(pml)

    def assemble(self, prompt: Prompt) -> PromptView:
        """Bring what a prompt imports to the device, and encode the rest of it.

        What prompts have in common is in the views of all, and in memory once.

        Raises:
            PMLError: Arguments longer than their slots, or a prompt longer than the model's context.
            InvalidRequestError: Its schema is not registered, or another one of that name is.
            CapacityError: Pinned messages leave no room now.
        """
        return self._assembled(prompt, lazy=False)

    def generate(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> MessageHandle:
        """Answer a prompt of a registered schema as the assistant: a leased handle. Raises what `assemble` raises.

        Args:
            prompt: The prompt.
            sampling: How tokens are chosen.
            options: As of `engine.decode`; `author` names the speaker.
        """
        with self._assembled(prompt, lazy=True) as view:
            said: MessageHandle = self.engine.decode(**vars(view.call(sampling, **options)))
            return said

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[StreamedToken | MessageHandle]:
        """Answer a prompt, yielding each token as it comes and the handle last."""
        with self._assembled(prompt, lazy=True) as view:
            yield from self.engine.stream(**vars(view.call(sampling, **options)))

    def flush(self) -> None:
        """Wait until all files are written.

        Raises:
            OSError: Something could not be.
        """
        written(self._kept)

    def close(self) -> None:
        """Write what is to be written, and give everything up but files; the engine stays open."""
        self._kept.close()
        for schema in self.schemas:
            self.forget(schema)

    def __enter__(self) -> SchemaLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, schema: str) -> tuple[CompiledSchema, Shelf]:
        with self._lock:
            if (found := self._known.get(schema)) is not None:
                return found
            known = ", ".join(map(repr, self._known)) or "none"
        raise InvalidRequestError(f"schema {schema!r} is not registered, but {known}: call register() first")

    def _assembled(self, prompt: Prompt, *, lazy: bool) -> PromptView:
        """See `assemble`; if `lazy`, what is not imported is encoded in the step of the answer that reads it."""
        compiled, shelf = found = self._find(prompt.schema.name)
        assembly = compile_prompt(compiled, prompt, self.engine.model)
        with shelf.brought(placed.key for placed in assembly.cached) as handles:
            if self._find(prompt.schema.name) is not found:  # then these are pieces of another
                raise InvalidRequestError(
                    f"schema {prompt.schema.name!r} was replaced meanwhile: read the prompt again"
                )
            return encoded_view(self.engine, assembly, handles, lazy=lazy)


def _named(compiled: CompiledSchema, modules: Iterable[str] | None) -> list[PieceKey]:
    """The keys of modules and all that is in them."""
    paths = [()] if modules is None else [tuple(name.split("/")) for name in modules]
    known = {piece.module for piece in compiled.pieces.values()} | {()}
    for path in paths:
        if not any(each[: len(path)] == path for each in known):
            raise InvalidRequestError(f"schema {compiled.schema.name!r} has no module {'/'.join(path)!r}")
    inside = (p for p in compiled.cached_pieces() if any(p.module[: len(path)] == path for path in paths))
    return [piece.key for piece in inside]
