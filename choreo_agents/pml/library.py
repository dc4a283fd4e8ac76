"""Library of schemas whose modules are encoded once, and of prompts assembled from them (Prompt Cache, section 3).

The library leases the encoded pieces of a schema, so that the engine keeps them in one of its tiers, or in files:

device    the engine's KV pool
host      the engine's host memory, if enabled: pieces evicted from the device
disk      a folder of files that outlives the engine and is shared between processes
nowhere   encoded when it is next read
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from choreo_agents.arguments import refuses_unknown
from choreo_agents.engine import Engine, Prefill, StreamedToken
from choreo_agents.engine.persistent_kv import PersistentKV
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import CapacityError, ChoreoError, HandleError, InvalidRequestError
from choreo_agents.kv.entry import TierName
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.store import KVKey
from choreo_agents.pml.assembling import PromptView, compile_prompt, encoded_view
from choreo_agents.pml.compiler import CompiledSchema, PieceKey, SchemaPiece, compile_schema
from choreo_agents.pml.schema import Prompt, Schema
from choreo_agents.sampling import Sampling

Place = Literal["device", "host", "disk", "nowhere"]
_BATCH_TOKENS = 4096
"""Approximate number of tokens that are encoded in one batch."""


@dataclass(eq=False)
class _Slot:
    """A piece, and its state in the engine."""

    call: Prefill
    """Call that encodes it, once its parents are encoded."""
    key: KVKey
    """Key of its KV, known before it is encoded."""
    parents: list[_Slot]
    depth: int
    leases: Leases | None = None
    """The cache's own lease, outside any scope."""
    pinned: bool = False
    is_dropped: bool = False
    """Whether the cache has dropped it."""
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while its file is read, so that concurrent calls read it once."""


class ModuleCache:
    """Cache of the pieces of a schema, which it leases so that the engine keeps them. Thread-safe.

    Its leases are outside any scope; callers of `brought` get leases of their own.

    Args:
        engine: Encodes pieces, and holds them on the device and the host.
        persistent: Holds them on disk, if it has a store; otherwise every process encodes them again.
    """

    def __init__(self, engine: Engine, persistent: PersistentKV | None = None) -> None:
        self._engine, self._persistent = engine, engine.kv.persistent_kv(None) if persistent is None else persistent
        stats, geometry = engine.stats(), engine.model.adapter.geometry
        self._batch_tokens = max(1, min(_BATCH_TOKENS, stats.kv_budget_bytes // geometry.bytes_per_token // 4))
        self._lock = threading.RLock()
        self._slots: Mapping[PieceKey, _Slot] = {}

    def know(self, schema: str, pieces: Iterable[SchemaPiece]) -> None:
        """Replace the pieces by these, parents first; nothing is encoded, and files stay.

        Args:
            schema: Name of the schema, which names its modules in lineage and audits.
            pieces: The new pieces; unchanged ones keep their state.
        """
        with self._lock:
            slots: dict[PieceKey, _Slot] = {}
            for piece in pieces:
                parents = [slots[parent] for parent in piece.parents]
                context = [slot.key.handle for slot in parents], [slot.call.position for slot in parents]
                author = "/".join([schema, *piece.module])
                call = Prefill(piece.tokens, *context, piece.start, author, "module", confidential=piece.confidential)
                current = self._slots.get(piece.key)
                if current is None or current.call != call:
                    depth = 1 + max((parent.depth for parent in parents), default=0)
                    current = _Slot(call, self._engine.kv.key(call), parents, depth)
                slots[piece.key] = current
            before, self._slots = self._slots, slots
            for slot in set(before.values()).difference(slots.values()):
                slot.is_dropped = True
                self._unpin(slot)
                self._give_up(slot)

    @contextmanager
    def brought(self, keys: Iterable[PieceKey], *, patient: bool = False) -> Iterator[dict[PieceKey, MessageHandle]]:
        """Lease pieces and all that they attend to, from any tier or file; encode those that are nowhere.

        Threads read files while the pieces without files are encoded.

        Args:
            keys: Keys of the pieces.
            patient: Wait for each batch to be written before the next is encoded.

        Yields:
            Handles by key, leased within the block only.
        """
        with self._lock:
            requested = {key: self._slot(key) for key in keys}
        with ExitStack() as stack:
            for level in _levels(requested.values()):
                missing = [slot for slot in level if not self._lease_for_call(slot, stack)]
                filed = [slot for slot in missing if self._has_file(slot)]
                with ThreadPoolExecutor(2, "choreo-library-read") as threads:
                    read = [threads.submit(self._read, slot, stack) for slot in filed]
                    self._encode([slot for slot in missing if slot not in filed], stack, patient=patient)
                    unread = [slot for slot, future in zip(filed, read, strict=True) if not future.result()]
                self._encode(unread, stack, patient=patient)
            yield {key: slot.key.handle for key, slot in requested.items()}

    def pin(self) -> None:
        """Bring all pieces to the device, and pin them there."""
        with self.brought(self._slots) as handles:
            self._engine.kv.prefetch(list(handles.values()))
            with self._lock:
                for slot in (self._slots[key] for key in handles.keys() & self._slots.keys()):
                    if not slot.pinned:
                        self._lease(slot)
                        self._engine.kv.pin(slot.key.handle)
                        slot.pinned = True

    def unpin(self) -> None:
        """Undo `pin`."""
        with self._lock:
            for slot in self._slots.values():
                self._unpin(slot)

    def evict(self, keys: Iterable[PieceKey], *, files: bool = False) -> None:
        """Evict pieces from device and host and, with `files`, from disk. Pinned pieces stay."""
        self._persistent.wait()
        with self._lock:
            free = [slot for slot in map(self._slot, keys) if self._tier(slot) is None or not slot.pinned]
            for slot in free:
                self._give_up(slot)
            if files:
                self._persistent.unpersist([slot.key.id for slot in free])
        self._persistent.wait()

    def place(self, key: PieceKey) -> tuple[Place, bool]:
        """Return the fastest tier that has a piece, and whether the piece is pinned."""
        with self._lock:
            slot = self._slot(key)
            tier = self._tier(slot)
            if tier is None or tier == "lineage":
                return "disk" if self._has_file(slot) else "nowhere", slot.pinned
            return tier, slot.pinned

    def _slot(self, key: PieceKey) -> _Slot:
        if key not in self._slots:
            raise InvalidRequestError(f"piece {key!r} does not exist any more: its schema was replaced or deleted")
        return self._slots[key]

    def _lease_for_call(self, slot: _Slot, stack: ExitStack) -> bool:
        """Lease a piece for a call; return False if it is not encoded, or if its file is better than recomputing it."""
        with self._lock:
            tier = self._tier(slot)
            is_readable = tier is not None and (tier != "lineage" or not self._has_file(slot))
            with suppress(HandleError):  # released by another thread meanwhile
                if is_readable:
                    stack.callback(self._engine.kv.lease([slot.key.handle], scoped=False).release)
                    return True
            return False

    def _has_file(self, slot: _Slot) -> bool:
        return self._persistent.has(slot.key.id)

    def _read(self, slot: _Slot, stack: ExitStack) -> bool:
        """Import a piece from its file, once for all calls that wait for it; return whether that succeeded."""
        assert self._persistent.store is not None
        with slot.reading:
            if self._lease_for_call(slot, stack):
                return True
            loaded = self._persistent.store.load(slot.key)
            if loaded is None:
                return False
            try:
                with self._engine.scope():
                    self._engine.kv.import_kv(slot.call, *loaded)
                    self._take(slot, stack)
            except InvalidRequestError:
                self._persistent.store.set_aside(slot.key.id, "has KV of another shape or dtype")
                return False
            except CapacityError:
                return False  # running calls take all memory; encoding it instead waits for some
            return True

    def _encode(self, slots: Sequence[_Slot], stack: ExitStack, *, patient: bool) -> None:
        """Encode pieces in batches; the engine encodes once what several calls need at the same time."""
        for batch in _batches(slots, self._batch_tokens):
            with self._engine.scope():
                handles = self._engine.prefill([slot.call for slot in batch])
                for slot in batch:
                    self._take(slot, stack)
            if self._persistent.store is not None:
                self._persistent.persist(handles, lost_too=True)
                if patient:
                    flush_kv(self._persistent)

    def _take(self, slot: _Slot, stack: ExitStack) -> None:
        """Lease an encoded piece for a call, and for the cache unless it was dropped meanwhile."""
        stack.callback(self._engine.kv.lease([slot.key.handle], scoped=False).release)
        with self._lock:
            if not slot.is_dropped:
                self._lease(slot)

    def _lease(self, slot: _Slot) -> None:
        if self._tier(slot) is None:
            slot.leases = self._engine.kv.lease([slot.key.handle], scoped=False)

    def _tier(self, slot: _Slot) -> TierName | None:
        """Return the fastest tier that has a piece; None if it is not leased, or was released by others."""
        tier = None if slot.leases is None else self._engine.kv.tiers([slot.key.handle])[0]
        if tier is None:
            slot.leases, slot.pinned = None, False
        return tier

    def _unpin(self, slot: _Slot) -> None:
        if self._tier(slot) is not None and slot.pinned:
            slot.pinned = False
            with suppress(HandleError):
                self._engine.kv.unpin(slot.key.handle)

    def _give_up(self, slot: _Slot) -> None:
        leases, slot.leases = slot.leases, None
        if leases is not None:
            leases.release()


def flush_kv(persistent: PersistentKV) -> None:
    """Wait until all encoded pieces are written; raise `OSError` if that fails."""
    with suppress(ChoreoError):  # pieces that were evicted meanwhile are written another time
        persistent.flush()


def _levels(slots: Iterable[_Slot]) -> Iterator[list[_Slot]]:
    """Yield pieces and all that they attend to in levels, each piece once, and parents in earlier levels."""
    ordered, pending = dict[_Slot, None](), list(slots)
    while pending:
        slot = pending.pop()
        if slot not in ordered:
            ordered[slot] = None
            pending += slot.parents
    for _, level in groupby(sorted(ordered, key=attrgetter("depth")), key=attrgetter("depth")):
        yield list(level)


def _batches(slots: Sequence[_Slot], most: int) -> Iterator[list[_Slot]]:
    """Split pieces into batches of about `most` tokens, or of one piece."""
    ends = accumulate(slot.key.length for slot in slots)
    for _, batch in groupby(zip(slots, ends, strict=True), key=lambda pair: (pair[1] - 1) // most):
        yield [slot for slot, _ in batch]


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

    Modules are in the engine's tiers, in a folder, or nowhere until they are next imported; importing brings them to
    the device. The library's leases are outside any `engine.scope()`. Library and files belong to the engine's tenant.

    Args:
        engine: Encodes modules and answers prompts.
        folder: Directory of files that outlive the engine, with one sub-directory per model fingerprint and tenant.
            Processes may share it. None: every process encodes the modules.
        disk_bytes: Upper bound on the bytes of files.
    """

    @refuses_unknown()
    def __init__(self, engine: Engine, folder: str | Path | None = None, *, disk_bytes: int = 1 << 34) -> None:
        if isinstance(disk_bytes, bool) or not isinstance(disk_bytes, int) or disk_bytes < 0:
            raise InvalidRequestError(f"disk_bytes must be a number of bytes, not {disk_bytes!r}")
        self.engine = engine
        """Engine that encodes modules and answers prompts."""
        store = None if folder is None else engine.kv.store(folder, disk_bytes)
        # An engine of another method, which encodes text again, has no KV to keep.
        self._persistent = engine.kv.persistent_kv(store if engine.method == "choreo" else None)
        self._known: dict[str, tuple[CompiledSchema, ModuleCache]] = {}
        self._lock = threading.Lock()
        """Guards `_known` and the pieces of its caches, which change together."""

    @property
    def schemas(self) -> tuple[str, ...]:
        """Names of the registered schemas."""
        return tuple(self._known)

    def compiled(self, schema: str) -> CompiledSchema:
        """Return a schema's pieces and positions for the engine's model.

        Raises:
            InvalidRequestError: There is no such schema.
        """
        return self._find(schema)[0]

    def register(self, schema: Schema, *, encode: Literal["eager", "lazy"] = "lazy") -> CompiledSchema:
        """Register a schema; one of the same name is replaced, and pieces that both have in common are kept.

        Args:
            schema: Schema that prompts import from.
            encode: `"eager"`: encode and write now all modules that are neither in memory nor in a file; `"lazy"`:
                encode them when a prompt imports them.

        Raises:
            PMLError: The schema is longer than the model's context.
            OSError: A file cannot be written.
        """
        compiled = compile_schema(schema, self.engine.model)
        with self._lock:
            _, module_cache = self._known.get(schema.name) or (compiled, ModuleCache(self.engine, self._persistent))
            module_cache.know(schema.name, compiled.cached_pieces())
            self._known[schema.name] = compiled, module_cache
        if encode == "eager":
            missing = [piece.key for piece in compiled.cached_pieces() if module_cache.place(piece.key)[0] == "nowhere"]
            with module_cache.brought(missing, patient=True):
                pass
        return compiled

    def forget(self, schema: str) -> None:
        """Remove a schema and release its encoded pieces; its files stay."""
        _, module_cache = self._find(schema)
        with self._lock:
            self._known.pop(schema, None)
            module_cache.know(schema, ())

    def load(self, schema: str, modules: Iterable[str] | None = None) -> None:
        """Bring modules to the device, from files if there are any.

        Args:
            schema: Name of the schema.
            modules: Names of modules, inner ones as `outer/inner`; None: all, with the schema's own text.
        """
        compiled, module_cache = self._find(schema)
        with module_cache.brought(_find_keys(compiled, modules), patient=True) as handles:
            self.engine.kv.prefetch(list(handles.values()))

    def evict(self, schema: str, modules: Iterable[str] | None = None, *, files: bool = False) -> None:
        """Evict modules from device and host and, with `files`, from disk. Pinned ones stay."""
        compiled, module_cache = self._find(schema)
        module_cache.evict(_find_keys(compiled, modules), files=files)

    def pin(self, schema: str) -> None:
        """Bring all of a schema to the device, and pin it there."""
        self._find(schema)[1].pin()

    def unpin(self, schema: str) -> None:
        """Undo `pin`."""
        self._find(schema)[1].unpin()

    def modules(self, schema: str) -> list[EncodedModule]:
        """Return the state of every piece of a schema."""
        compiled, module_cache = self._find(schema)
        token_bytes = self.engine.model.adapter.geometry.bytes_per_token
        return [
            EncodedModule(
                piece.key, piece.module, n := len(piece.tokens), n * token_bytes, *module_cache.place(piece.key)
            )
            for piece in compiled.cached_pieces()
        ]

    def prompt(self, schema: str, pml: str) -> Prompt:
        """Read a prompt of a registered schema.

        Raises:
            PMLError: The prompt is invalid; lists all problems.
        """
        return self.compiled(schema).schema.prompt(pml)

    def assemble(self, prompt: Prompt) -> PromptView:
        """Bring the modules that a prompt imports to the device, and encode the rest of it.

        Prompts share the KV of the modules that they have in common.

        Raises:
            PMLError: An argument is longer than its slot, or the prompt longer than the model's context.
            InvalidRequestError: Its schema is not registered, or another one of that name is.
            CapacityError: The pool has too little memory that is not pinned.
        """
        return self._assemble(prompt, lazy=False)

    def generate(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> MessageHandle:
        """Answer a prompt of a registered schema as the assistant; return a leased handle. Raises as `assemble`.

        Args:
            prompt: The prompt.
            sampling: Sampling parameters.
            options: Options of `engine.decode`; `author` names the speaker.
        """
        with self._assemble(prompt, lazy=True) as view:
            handle: MessageHandle = self.engine.decode(**vars(view.call(sampling, **options)))
            return handle

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[StreamedToken | MessageHandle]:
        """Answer a prompt, yielding each token as it comes and the handle last."""
        with self._assemble(prompt, lazy=True) as view:
            yield from self.engine.stream(**vars(view.call(sampling, **options)))

    def flush(self) -> None:
        """Wait until all files are written.

        Raises:
            OSError: A file could not be written.
        """
        flush_kv(self._persistent)

    def close(self) -> None:
        """Write pending files, and release everything else; the engine stays open."""
        self._persistent.close()
        for schema in self.schemas:
            self.forget(schema)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, schema: str) -> tuple[CompiledSchema, ModuleCache]:
        with self._lock:
            if (entry := self._known.get(schema)) is not None:
                return entry
            names = ", ".join(map(repr, self._known)) or "none"
        raise InvalidRequestError(f"schema {schema!r} is not registered: call register() first; registered: {names}")

    def _assemble(self, prompt: Prompt, *, lazy: bool) -> PromptView:
        """Assemble a prompt; with `lazy`, uncached text is encoded in the step of the answer that reads it."""
        compiled, module_cache = entry = self._find(prompt.schema.name)
        assembly = compile_prompt(compiled, prompt, self.engine.model)
        with module_cache.brought(placed.key for placed in assembly.cached) as handles:
            if self._find(prompt.schema.name) is not entry:  # the pieces are of a schema that was replaced meanwhile
                raise InvalidRequestError(
                    f"schema {prompt.schema.name!r} was replaced meanwhile: create the prompt again"
                )
            return encoded_view(self.engine, assembly, handles, lazy=lazy)


def _find_keys(compiled: CompiledSchema, modules: Iterable[str] | None) -> list[PieceKey]:
    """Return the keys of the pieces of modules, including modules inside."""
    paths = [()] if modules is None else [tuple(name.split("/")) for name in modules]
    module_paths = {piece.module for piece in compiled.pieces.values()} | {()}
    for path in paths:
        if not any(module_path[: len(path)] == path for module_path in module_paths):
            raise InvalidRequestError(f"schema {compiled.schema.name!r} has no module {'/'.join(path)!r}")
    inside = (p for p in compiled.cached_pieces() if any(p.module[: len(path)] == path for path in paths))
    return [piece.key for piece in inside]
