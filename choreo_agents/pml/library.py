"""Schemas whose modules are encoded once, and prompts that are assembled from them (Prompt Cache, section 3).

The encoded pieces of a schema are leased, and so in whichever of the engine's memories has room for them, or in files:

device    the engine's KV memory
host      the engine's host memory, if it was given any: what left the device
disk      a folder of files: outlives the engine, and processes share it
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
_TOGETHER = 4096
"""Tokens that are encoded as one batch, about."""


@dataclass(eq=False)
class _Slot:
    """A piece, and what became of it."""

    call: Prefill
    """What encodes it, once its parents are there."""
    key: KVKey
    """Its name, known before it is encoded."""
    parents: list[_Slot]
    depth: int
    leases: Leases | None = None
    """The shelf's lease, of no scope."""
    pinned: bool = False
    gone: bool = False
    """Whether the shelf does not know it any more."""
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is read from its file."""


class ModuleCache:
    """Leases the pieces of a schema, so that the engine keeps them. May be used from any thread.

    Its leases are of no scope; what it hands out is leased once more, for whoever asks.

    Args:
        engine: Encodes pieces, and has them on the device and the host.
        kept: Has them on disk, if it has a store; else every process encodes them again.
    """

    def __init__(self, engine: Engine, kept: PersistentKV | None = None) -> None:
        self._engine, self._kept = engine, engine.kv.persistent_kv(None) if kept is None else kept
        stats, geometry = engine.stats(), engine.model.adapter.geometry
        self._together = max(1, min(_TOGETHER, stats.kv_budget_bytes // geometry.bytes_per_token // 4))
        self._lock = threading.RLock()
        self._slots: Mapping[PieceKey, _Slot] = {}

    def know(self, schema: str, pieces: Iterable[SchemaPiece]) -> None:
        """Have these pieces, parents first, instead of those before; nothing is encoded, and files stay.

        Args:
            schema: Its name, by which lineage and audits call its modules.
            pieces: What was known, and does not differ, stays as it is.
        """
        with self._lock:
            slots: dict[PieceKey, _Slot] = {}
            for piece in pieces:
                parents = [slots[parent] for parent in piece.parents]
                seen = [slot.key.handle for slot in parents], [slot.call.position for slot in parents]
                author = "/".join([schema, *piece.module])
                call = Prefill(piece.tokens, *seen, piece.start, author, "module", confidential=piece.confidential)
                known = self._slots.get(piece.key)
                if known is None or known.call != call:
                    depth = 1 + max((parent.depth for parent in parents), default=0)
                    known = _Slot(call, self._engine.kv.key(call), parents, depth)
                slots[piece.key] = known
            before, self._slots = self._slots, slots
            for slot in set(before.values()).difference(slots.values()):
                slot.gone = True
                self._unpin(slot)
                self._give_up(slot)

    @contextmanager
    def brought(self, keys: Iterable[PieceKey], *, patient: bool = False) -> Iterator[dict[PieceKey, MessageHandle]]:
        """Have pieces, and what they attend to, ready to be read: from wherever they are, or encoded.

        Files are read by threads of their own while what has none is encoded.

        Args:
            keys: Whose.
            patient: Write what was encoded before encoding more.

        Yields:
            Handles by key, leased for as long as the block lasts: who needs them longer takes a lease.
        """
        with self._lock:
            asked = {key: self._slot(key) for key in keys}
        with ExitStack() as held:
            for level in _levels(asked.values()):
                missing = [slot for slot in level if not self._hold(slot, held)]
                filed = [slot for slot in missing if self._filed(slot)]
                with ThreadPoolExecutor(2, "choreo-library-read") as threads:
                    read = [threads.submit(self._read, slot, held) for slot in filed]
                    self._encode([slot for slot in missing if slot not in filed], held, patient=patient)
                    unread = [slot for slot, done in zip(filed, read, strict=True) if not done.result()]
                self._encode(unread, held, patient=patient)
            yield {key: slot.key.handle for key, slot in asked.items()}

    def pin(self) -> None:
        """Bring everything to the device, and keep it there."""
        with self.brought(self._slots) as handles:
            self._engine.kv.prefetch(list(handles.values()))
            with self._lock:
                for slot in (self._slots[key] for key in handles.keys() & self._slots.keys()):
                    if not slot.pinned:
                        self._lease(slot)
                        self._engine.kv.pin(slot.key.handle)
                        slot.pinned = True

    def unpin(self) -> None:
        """Keep it there no longer."""
        with self._lock:
            for slot in self._slots.values():
                self._unpin(slot)

    def evict(self, keys: Iterable[PieceKey], *, files: bool = False) -> None:
        """Give pieces up on the device and the host; with `files`, on disk, too. What is pinned stays."""
        self._kept.wait()
        with self._lock:
            free = [slot for slot in map(self._slot, keys) if self._tier(slot) is None or not slot.pinned]
            for slot in free:
                self._give_up(slot)
            if files:
                self._kept.unpersist([slot.key.id for slot in free])
        self._kept.wait()

    def place(self, key: PieceKey) -> tuple[Place, bool]:
        """The fastest memory that has a piece, and whether it is pinned there."""
        with self._lock:
            slot = self._slot(key)
            tier = self._tier(slot)
            if tier is None or tier == "lineage":
                return "disk" if self._filed(slot) else "nowhere", slot.pinned
            return tier, slot.pinned

    def _slot(self, key: PieceKey) -> _Slot:
        if key not in self._slots:
            raise InvalidRequestError(f"there is no piece {key!r} any more: its schema was replaced or forgotten")
        return self._slots[key]

    def _hold(self, slot: _Slot, held: ExitStack) -> bool:
        """Lease for a call what can be read as it is; what would be computed again is rather read from its file."""
        with self._lock:
            tier = self._tier(slot)
            there = tier is not None and (tier != "lineage" or not self._filed(slot))
            with suppress(HandleError):  # somebody else has released it
                if there:
                    held.callback(self._engine.kv.lease([slot.key.handle], scoped=False).release)
                    return True
            return False

    def _filed(self, slot: _Slot) -> bool:
        return self._kept.has(slot.key.id)

    def _read(self, slot: _Slot, held: ExitStack) -> bool:
        """Take a piece in from its file, once for all calls that wait for it; whether that was good."""
        assert self._kept.store is not None
        with slot.reading:
            if self._hold(slot, held):
                return True
            found = self._kept.store.load(slot.key)
            if found is None:
                return False
            try:
                with self._engine.scope():
                    self._engine.kv.import_kv(slot.call, *found)
                    self._take(slot, held)
            except InvalidRequestError:
                self._kept.store.set_aside(slot.key.id, "holds other keys and values")
                return False
            except CapacityError:
                return False  # running calls need all memory: a prefill waits for it
            return True

    def _encode(self, slots: Sequence[_Slot], held: ExitStack, *, patient: bool) -> None:
        """Ask the engine, which encodes once what several calls ask for: nobody waits for what only another needs."""
        for together in _batches(slots, self._together):
            with self._engine.scope():
                handles = self._engine.prefill([slot.call for slot in together])
                for slot in together:
                    self._take(slot, held)
            if self._kept.store is not None:
                self._kept.persist(handles, lost_too=True)
                if patient:
                    written(self._kept)

    def _take(self, slot: _Slot, held: ExitStack) -> None:
        """Lease what has arrived, for a call and for the shelf."""
        held.callback(self._engine.kv.lease([slot.key.handle], scoped=False).release)
        with self._lock:
            if not slot.gone:
                self._lease(slot)

    def _lease(self, slot: _Slot) -> None:
        if self._tier(slot) is None:
            slot.leases = self._engine.kv.lease([slot.key.handle], scoped=False)

    def _tier(self, slot: _Slot) -> TierName | None:
        """The fastest memory of the engine's that has it; None: it is not leased, or was released by others."""
        found = None if slot.leases is None else self._engine.kv.tiers([slot.key.handle])[0]
        if found is None:
            slot.leases, slot.pinned = None, False
        return found

    def _unpin(self, slot: _Slot) -> None:
        if self._tier(slot) is not None and slot.pinned:
            slot.pinned = False
            with suppress(HandleError):
                self._engine.kv.unpin(slot.key.handle)

    def _give_up(self, slot: _Slot) -> None:
        leases, slot.leases = slot.leases, None
        if leases is not None:
            leases.release()


def written(kept: PersistentKV) -> None:
    """Wait until all that was encoded is written; raises `OSError` if it cannot be."""
    with suppress(ChoreoError):  # what was lost meanwhile is written another time
        kept.flush()


def _levels(asked: Iterable[_Slot]) -> Iterator[list[_Slot]]:
    """These and all that they attend to, each once, parents in a level before."""
    found, left = dict[_Slot, None](), list(asked)
    while left:
        slot = left.pop()
        if slot not in found:
            found[slot] = None
            left += slot.parents
    for _, level in groupby(sorted(found, key=attrgetter("depth")), key=attrgetter("depth")):
        yield list(level)


def _batches(slots: Sequence[_Slot], most: int) -> Iterator[list[_Slot]]:
    """The same in parts of about so many tokens, or of one piece."""
    ends = accumulate(slot.key.length for slot in slots)
    for _, batch in groupby(zip(slots, ends, strict=True), key=lambda each: (each[1] - 1) // most):
        yield [slot for slot, _ in batch]


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


class SchemaLibrary(AbstractContextManager["SchemaLibrary"]):
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
        self._kept = engine.kv.persistent_kv(store if engine.method == "choreo" else None)
        self._known: dict[str, tuple[CompiledSchema, ModuleCache]] = {}
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
            _, module_cache = self._known.get(schema.name) or (compiled, ModuleCache(self.engine, self._kept))
            module_cache.know(schema.name, compiled.cached_pieces())
            self._known[schema.name] = compiled, module_cache
        if encode == "eager":
            missing = [piece.key for piece in compiled.cached_pieces() if module_cache.place(piece.key)[0] == "nowhere"]
            with module_cache.brought(missing, patient=True):
                pass
        return compiled

    def forget(self, schema: str) -> None:
        """Give a schema up, with all that is encoded of it; its files stay."""
        _, module_cache = self._find(schema)
        with self._lock:
            self._known.pop(schema, None)
            module_cache.know(schema, ())

    def load(self, schema: str, modules: Iterable[str] | None = None) -> None:
        """Bring modules to the device, from files if there are any.

        Args:
            schema: Whose.
            modules: Their names, with `/` between inner ones'; None: all, the schema's own text too.
        """
        compiled, module_cache = self._find(schema)
        with module_cache.brought(_named(compiled, modules), patient=True) as handles:
            self.engine.kv.prefetch(list(handles.values()))

    def evict(self, schema: str, modules: Iterable[str] | None = None, *, files: bool = False) -> None:
        """Give modules up on the device and the host; with `files`, on disk, too. Pinned ones stay."""
        compiled, module_cache = self._find(schema)
        module_cache.evict(_named(compiled, modules), files=files)

    def pin(self, schema: str) -> None:
        """Bring all of a schema to the device, and keep it there."""
        self._find(schema)[1].pin()

    def unpin(self, schema: str) -> None:
        """Undo `pin`."""
        self._find(schema)[1].unpin()

    def modules(self, schema: str) -> list[EncodedModule]:
        """Where everything of a schema is."""
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, schema: str) -> tuple[CompiledSchema, ModuleCache]:
        with self._lock:
            if (found := self._known.get(schema)) is not None:
                return found
            known = ", ".join(map(repr, self._known)) or "none"
        raise InvalidRequestError(f"schema {schema!r} is not registered, but {known}: call register() first")

    def _assembled(self, prompt: Prompt, *, lazy: bool) -> PromptView:
        """See `assemble`; if `lazy`, what is not imported is encoded in the step of the answer that reads it."""
        compiled, module_cache = found = self._find(prompt.schema.name)
        assembly = compile_prompt(compiled, prompt, self.engine.model)
        with module_cache.brought(placed.key for placed in assembly.cached) as handles:
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
