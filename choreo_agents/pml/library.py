"""Library of schemas whose modules are encoded once, and of prompts assembled from them (Prompt Cache, section 3).

The library leases the pieces of a schema, lazily prefilled, so that the engine keeps them in one of its tiers:

device    the engine's KV pool
host      the engine's host memory, if enabled: pieces evicted from the device
disk      a file of the engine: of `Memory(persist_dir=...)`, which outlives it, or of `Memory(disk=...)`
nowhere   encoded when it is next read
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine, Prefill, StreamedToken
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import (
    ChoreoError,
    EngineClosedError,
    HandleError,
    InvalidRequestError,
    ReleasedHandleError,
)
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.pml.assembling import PromptView, compile_prompt, encoded_view
from choreo_agents.pml.compiler import CompiledSchema, PieceKey, SchemaPiece, compile_schema
from choreo_agents.pml.schema import Prompt, Schema
from choreo_agents.sampling import Sampling

Place = Literal["device", "host", "disk", "nowhere"]
_BATCH_TOKENS = 4096
"""Approximate number of tokens that are encoded in one batch."""


class EncodedSchema:
    """A schema's pieces on one engine, each leased outside any scope from its first use on. Thread-safe.

    A piece is a lazy prefill: it is encoded by the first call that reads it, unless a tier or a file has it.
    """

    def __init__(self, engine: Engine, compiled: CompiledSchema) -> None:
        self.compiled = compiled
        """The schema's pieces and positions for the engine's model."""
        self.keys = [piece.key for piece in compiled.cached_pieces()]
        """Keys of the pieces that can be encoded in advance, parents first."""
        self.pinned = set[PieceKey]()
        """Keys of all pieces, while they are pinned."""
        self._engine = engine
        pool_tokens = engine.stats().kv_budget_bytes // engine.model.adapter.geometry.bytes_per_token
        self._batch_tokens = min(_BATCH_TOKENS, pool_tokens // 4)
        self._lock = threading.RLock()
        self._calls: dict[PieceKey, Prefill] = {}
        self._handles: dict[PieceKey, MessageHandle] = {}
        """Handles of all pieces, leased or not."""
        for key, piece in compiled.pieces.items():
            parents = [self._handles[parent] for parent in piece.parents]
            context = parents, [compiled.pieces[parent].start for parent in piece.parents], piece.start
            author = "/".join([compiled.schema.name, *piece.module])
            self._calls[key] = Prefill(piece.tokens, *context, author, "module", piece.confidential, lazy=True)
            named = engine.kv.key(self._calls[key])
            self._handles[key] = MessageHandle(id=named.id, model=named.model, length=named.length)
        self._leased: dict[PieceKey, Leases] = {}
        self._closed = False

    def handles(self, keys: Iterable[PieceKey]) -> list[MessageHandle]:
        """Return handles of pieces, which this leases; nothing is encoded.

        Raises:
            InvalidRequestError: The schema was replaced or deleted.
        """
        keys = [*keys]
        with self._engine.scope():  # keeps what others evict meanwhile
            with self._lock:
                missing = self._unleased(keys)
                self._engine.kv.lease([self._handles[key] for key in self._with_parents(keys) if key in self._leased])
            for key in missing:
                self._engine.prefill([self._calls[key]])  # without the lock: it may wait for the rate limit
            with self._lock:
                self._require_open()
                for key in {*keys, *missing} - self._leased.keys():
                    self._leased[key] = self._engine.kv.lease([self._handles[key]], scoped=False)
        return [self._handles[key] for key in keys]

    def lease(self, keys: Iterable[PieceKey]) -> Leases:
        """Lease pieces for a caller, in its scope. Raises as `handles`."""
        keys = [*keys]
        while True:
            with suppress(ReleasedHandleError):  # evicted meanwhile
                return self._engine.kv.lease(self.handles(keys))

    def encode(self, keys: Sequence[PieceKey]) -> None:
        """Encode the pieces that no tier has and, if the engine persists KV, write them.

        Raises:
            OSError: A file cannot be written. ChoreoError: KV was lost meanwhile, and cannot be computed again.
        """
        with self._engine.scope():
            for handles in self._encoded(keys):
                self._engine.kv.persist(handles)
                self._engine.kv.flush()

    def prefetch(self, keys: Sequence[PieceKey]) -> None:
        """Bring pieces to the device; encode those that no tier has, and write them in the background."""
        with self._engine.scope():
            for handles in self._encoded(keys):
                tiers = zip(handles, self._engine.kv.tiers(handles), strict=True)
                self._engine.kv.prefetch([handle for handle, tier in tiers if tier != "device"])
                self._engine.kv.persist(handles)

    def pin(self) -> None:
        """Bring all pieces to the device, and pin them there; what was not pinned stays so if there is no room."""
        new = list[PieceKey]()
        try:
            with self._engine.scope():
                self.lease(self.keys)  # for now, whoever evicts them meanwhile
                with self._lock:
                    self._require_open()
                    for key in self.keys:
                        if key not in self.pinned:
                            self._engine.kv.pin(self._handles[key])
                            self.pinned.add(key)
                            new.append(key)
                self.prefetch(self.keys)
        except BaseException:
            self.unpin(new)
            raise

    def unpin(self, keys: Iterable[PieceKey] | None = None) -> None:
        """Undo `pin`, of all pieces or of some."""
        with self._lock:
            for key in self.keys if keys is None else keys:
                if key in self.pinned:
                    self.pinned.remove(key)
                    with suppress(HandleError, InvalidRequestError, EngineClosedError):  # released by others
                        self._engine.kv.unpin(self._handles[key])

    def evict(self, keys: Sequence[PieceKey], *, files: bool = False) -> None:
        """Evict pieces from device and host and, with `files`, from `Memory(persist_dir=...)`, unless they are pinned.

        Raises:
            OSError: A file cannot be removed.
        """
        with self._lock:
            free = [] if self.pinned else keys
            for key in free:
                self._drop(key)
        if files:
            self._engine.kv.unpersist([self._handles[key] for key in free])

    def places(self) -> dict[PieceKey, Place]:
        """Return the fastest tier that has each piece; nothing is leased."""
        handles = [self._handles[key] for key in self.keys]
        persisted = self._engine.kv.persisted(handles)
        places: dict[PieceKey, Place] = {}
        for key, has_file, tier in zip(self.keys, persisted, self._engine.kv.tiers(handles), strict=True):
            below: Place = "disk" if has_file else "nowhere"
            places[key] = below if tier is None or tier == "lineage" else tier
        return places

    def take_over(self, replaced: EncodedSchema) -> None:
        """Lease what a schema of the same name has leased, as far as this has it too, and close that."""
        try:
            self.handles([key for key in self.keys if key in replaced._leased])
        finally:
            replaced.close()

    def close(self) -> None:
        """Release all pieces; their files stay."""
        with self._lock:
            self._closed = True
            self.unpin()
            for key in [*self._leased]:
                self._drop(key)

    def _encoded(self, keys: Sequence[PieceKey]) -> Iterator[list[MessageHandle]]:
        """Lease pieces for a scope and encode those that no tier has; yield the pieces of each batch."""
        needed = self._with_parents(keys)
        self._engine.kv.persisted([self._handles[key] for key in needed])  # files of other processes are as good
        self.lease(needed)
        for batch in _batches([self.compiled.pieces[key] for key in keys], self._batch_tokens):
            if missing := self._missing(batch):
                self._engine.prefill([replace(self._calls[key], lazy=False) for key in missing])
            # A prefill only finds what was encoded once, and has been lost since.
            self._engine.kv.prefetch([self._handles[key] for key in self._missing(batch)])
            yield [self._handles[key] for key in batch]

    def _missing(self, keys: Sequence[PieceKey]) -> list[PieceKey]:
        """Return which leased pieces no tier has."""
        tiers = self._engine.kv.tiers([self._handles[key] for key in keys])
        return [key for key, tier in zip(keys, tiers, strict=True) if tier == "lineage"]

    def _require_open(self) -> None:
        if self._closed:
            name = self.compiled.schema.name
            raise InvalidRequestError(f"schema {name!r} was replaced or deleted meanwhile: create the prompt again")

    def _with_parents(self, keys: Iterable[PieceKey]) -> list[PieceKey]:
        return [*dict.fromkeys(part for key in keys for part in (*self.compiled.pieces[key].parents, key))]

    def _unleased(self, keys: Sequence[PieceKey]) -> list[PieceKey]:
        """Return which pieces are not leased, with the parents that they need, parents first."""
        needed = self._with_parents(keys)
        handles = [self._handles[key] for key in needed]
        with self._lock:
            self._require_open()
            for key, tier in zip(needed, self._engine.kv.tiers(handles), strict=True):
                if tier is None:  # others have released it, which ends its pin, too
                    self._leased.pop(key, None)
                    self.pinned.discard(key)
            missing = self._with_parents(key for key in keys if key not in self._leased)
            return [key for key in missing if key not in self._leased]

    def _drop(self, key: PieceKey) -> None:
        if key in self._leased:
            self._leased.pop(key).release()


def _batches(pieces: Iterable[SchemaPiece], most: int) -> Iterator[list[PieceKey]]:
    """Split pieces into batches of at most `most` tokens, or of one piece, each after the batches of its parents."""
    batch, tokens = dict[PieceKey, SchemaPiece](), 0
    for piece in sorted(pieces, key=lambda piece: len(piece.parents)):  # a child has its parents' parents, too
        tokens += len(piece.tokens)
        if batch and (tokens > most or not batch.keys().isdisjoint(piece.parents)):
            yield [*batch]
            batch, tokens = {}, len(piece.tokens)
        batch[piece.key] = piece
    if batch:
        yield [*batch]


@dataclass(frozen=True)
class EncodedModule:
    """State of one piece of a schema: a text between modules or parameters, or a parameter's placeholders."""

    key: str
    """`plan/miami#0` is the first piece of a module, `#0` that of the schema."""
    module: tuple[str, ...]
    tokens: int
    bytes: int
    """Bytes of its KV."""
    place: Place
    pinned: bool


class SchemaLibrary(AbstractContextManager["SchemaLibrary"]):
    """Encoded modules of schemas, for prompts on one engine. May be used from any thread and event loop.

    Modules are in the engine's tiers, or nowhere until they are next read. With `Memory(persist_dir=...)` and a salt
    they are also in files that outlive the engine, and that processes share. The library's leases are outside any
    `engine.scope()`.

    Args:
        engine: Encodes modules and answers prompts.

    Raises:
        InvalidRequestError: The engine has `Memory(persist_dir=...)`, but no salt.
    """

    @refuses_unknown()
    def __init__(self, engine: Engine) -> None:
        engine.kv.persisted([])
        self.engine = engine
        """Engine that encodes modules and answers prompts."""
        self._known: dict[str, EncodedSchema] = {}
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        """Held while a schema takes over the pieces of another, which may wait for the tenant's rate limit."""

    @property
    def schemas(self) -> tuple[str, ...]:
        """Names of the registered schemas."""
        return tuple(self._known)

    def compiled(self, schema: str) -> CompiledSchema:
        """Return a schema's pieces and positions for the engine's model.

        Raises:
            InvalidRequestError: There is no such schema.
        """
        return self._find(schema).compiled

    def register(self, schema: Schema, *, encode: Literal["eager", "lazy"] = "lazy") -> CompiledSchema:
        """Register a schema; one of the same name is replaced: its pins end, pieces that both have in common are kept.

        Args:
            schema: Schema that prompts import from.
            encode: `"eager"`: encode and write now all modules that are neither in memory nor in a file; `"lazy"`:
                encode them when a prompt that imports them is read.

        Raises:
            PMLError: The schema is longer than the model's context.
            OSError: A file cannot be written. ChoreoError: KV was lost meanwhile, and cannot be computed again.
        """
        encoded = EncodedSchema(self.engine, compile_schema(schema, self.engine.model))
        with self._registering:
            with self._lock:
                replaced, self._known[schema.name] = self._known.get(schema.name), encoded
            if replaced is not None:
                encoded.take_over(replaced)
        if encode == "eager":
            encoded.encode(encoded.keys)
        return encoded.compiled

    def forget(self, schema: str) -> None:
        """Remove a schema and release its encoded pieces; its files stay."""
        self._find(schema, remove=True).close()

    def load(self, schema: str, modules: Iterable[str] | None = None) -> None:
        """Bring modules to the device, from files if there are any.

        Args:
            schema: Name of the schema.
            modules: Names of modules, inner ones as `outer/inner`; None: all, with the schema's own text.
        """
        encoded = self._find(schema)
        encoded.prefetch(_find_keys(encoded.compiled, modules))

    def evict(self, schema: str, modules: Iterable[str] | None = None, *, files: bool = False) -> None:
        """Evict modules from device and host and, with `files`, from files that outlive the engine, unless the schema
        is pinned. What a view still leases stays until that is released."""
        encoded = self._find(schema)
        encoded.evict(_find_keys(encoded.compiled, modules), files=files)

    def pin(self, schema: str) -> None:
        """Bring all of a schema to the device, and pin it there."""
        self._find(schema).pin()

    def unpin(self, schema: str) -> None:
        """Undo `pin`."""
        self._find(schema).unpin()

    def modules(self, schema: str) -> list[EncodedModule]:
        """Return the state of every piece of a schema."""
        encoded = self._find(schema)
        token_bytes = self.engine.model.adapter.geometry.bytes_per_token
        modules = list[EncodedModule]()
        for key, place in encoded.places().items():
            piece = encoded.compiled.pieces[key]
            tokens = len(piece.tokens)
            is_pinned = place == "device" and key in encoded.pinned  # unless others have released it
            modules.append(EncodedModule(key, piece.module, tokens, tokens * token_bytes, place, is_pinned))
        return modules

    def prompt(self, schema: str, pml: str) -> Prompt:
        """Read a prompt of a registered schema.

        Raises:
            PMLError: The prompt is invalid; lists all problems.
        """
        return self.compiled(schema).schema.prompt(pml)

    def assemble(self, prompt: Prompt) -> PromptView:
        """Lease the modules that a prompt imports, and the rest of it. The first call that reads the view encodes, in
        its own step, what no tier has; `engine.kv.prefetch(view.handles)` does so before.

        Prompts share the KV of the modules that they have in common.

        Raises:
            PMLError: An argument is longer than its slot, or the prompt longer than the model's context.
            InvalidRequestError: Its schema is not registered, or another one of that name is.
        """
        encoded = self._find(prompt.schema.name)
        assembly = compile_prompt(encoded.compiled, prompt, self.engine.model)
        return encoded_view(self.engine, assembly, encoded.lease(piece.key for piece in assembly.cached))

    def generate(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> MessageHandle:
        """Answer a prompt of a registered schema as the assistant; return a leased handle. Raises as `assemble`.

        Args:
            prompt: The prompt.
            sampling: Sampling parameters.
            options: Options of `engine.decode`; `author` names the speaker.

        Raises:
            CapacityError: The pool has too little memory that is not pinned.
        """
        with self._answered(prompt) as view:
            handle: MessageHandle = self.engine.decode(**vars(view.call(sampling, **options)))
            return handle

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[StreamedToken | MessageHandle]:
        """Answer a prompt, yielding each token as it comes and the handle last. Raises as `generate`."""
        with self._answered(prompt) as view:
            yield from self.engine.stream(**vars(view.call(sampling, **options)))

    def close(self) -> None:
        """Release everything; the engine stays open, and writes pending files."""
        for schema in self.schemas:
            self.forget(schema)

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _answered(self, prompt: Prompt) -> Iterator[PromptView]:
        """Assemble a prompt for a block that answers it, and write the modules that were encoded for that."""
        with self.assemble(prompt) as view:
            yield view
            with suppress(ChoreoError):  # the answer is there, and files are written another time
                self.engine.kv.persist(view.modules)

    def _find(self, schema: str, *, remove: bool = False) -> EncodedSchema:
        with self._lock:
            if (encoded := self._known.get(schema)) is not None:
                if remove:
                    del self._known[schema]
                return encoded
            names = ", ".join(map(repr, self._known)) or "none"
        raise InvalidRequestError(f"schema {schema!r} is not registered: call register() first; registered: {names}")


def _find_keys(compiled: CompiledSchema, modules: Iterable[str] | None) -> list[PieceKey]:
    """Return the keys of the pieces of modules, including modules inside."""
    paths = [()] if modules is None else [tuple(name.split("/")) for name in modules]
    known = {module.path for module in compiled.layout.modules()}
    for path in paths:
        if path not in known:
            raise InvalidRequestError(f"schema {compiled.schema.name!r} has no module {'/'.join(path)!r}")
    inside = (p for p in compiled.cached_pieces() if any(p.module[: len(path)] == path for path in paths))
    return [piece.key for piece in inside]
