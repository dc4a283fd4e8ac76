"""The engine: prefill and decode over one global KV cache, sync, async and streaming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from choreo_agents.attention.backends import BackendName
from choreo_agents.engine.adapters import read_loaded
from choreo_agents.engine.adopting import Adopting
from choreo_agents.engine.calls import Usage
from choreo_agents.engine.core import EngineCore, Settings
from choreo_agents.engine.desk import Desk
from choreo_agents.engine.joining import Joining
from choreo_agents.engine.lineage import LineageReport
from choreo_agents.engine.memory_map import MemoryMap
from choreo_agents.engine.methods import MethodName
from choreo_agents.engine.records import MessageRecord, records_of
from choreo_agents.engine.scope import Scope, entered
from choreo_agents.engine.stats import EngineStats
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.kv.tiers import Stored
from choreo_agents.models import ChatFormat, LoadedModel, load_model
from choreo_agents.runtime.timetable import Timetable
from choreo_agents.sampling import Chosen
from choreo_agents.tracing import EventSink, discard


class Engine(Adopting):
    """An in-process engine over a Hugging Face model.

    `prefill` and `decode` encode a message with attention to any encoded before, wherever the call places them. Calls
    from any thread and event loop share the model's steps. Each handle comes with a lease, which `release` drops.
    """

    def __init__(
        self, model: LoadedModel, settings: Settings, *, salt: str = "", starts_per_s: float | None = None
    ) -> None:
        self._serve(EngineCore(model, settings), {}, salt, starts_per_s)

    def _serve(self, core: EngineCore, desks: dict[str, Desk], salt: str, starts_per_s: float | None) -> None:
        self._core, self._desks = core, desks
        with core.lock:
            if salt not in desks:
                desks[salt] = Desk(core, salt)
        super().__init__(desks[salt])
        if starts_per_s is not None:
            self._desk.limit(starts_per_s)

    @classmethod
    def load(
        cls,
        model: str | Path | LoadedModel = "embedded",
        *,
        method: MethodName = "choreo",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        kv_budget_bytes: int = 1 << 30,
        host_bytes: int = 0,
        disk: str | Path | None = None,
        disk_bytes: int = 1 << 34,
        mapped_storage: Stored = "full",
        step_tokens: int = 512,
        backend: BackendName = "auto",
        seed: int = 0,
        salt: str = "",
        starts_per_s: float | None = None,
        sink: EventSink = discard,
        timetable: Timetable | None = None,
        adapter: str | Path | None = None,
    ) -> Engine:
        """Load a model and start an engine over it.

        Args:
            model: `"embedded"`, a folder in Hugging Face's layout, a hub name, or a model loaded before.
            method: From the cache, or from re-encoded text (Prompt Choreography, section 3.1).
            device: Where model and KV live; by default the CPU.
            dtype: Of weights and KV; by default fp32 on a CPU, else the checkpoint's own.
            kv_budget_bytes: Upper bound of the KV memory that steps read. What nothing reads or pins leaves it when
                others need the room, the least recently used first, and comes back when it is read.
            host_bytes: Upper bound of the host memory for what left it.
            disk: A folder for what has no room there either. Without one it is computed again from its lineage.
            disk_bytes: Upper bound of this model's files in that folder.
            mapped_storage: How a cache mapper's copies are kept once they have left the KV memory: `"full"`, as they
                are; `"int8"`, in a quarter of what fp32 takes, for which the mapper rounds them when it makes them;
                `"low-rank"`, not at all: they are made again from what they are copies of, bit by bit the same.
            step_tokens: Tokens encoded in one forward pass at most; longer prefills are cut into chunks.
            backend: What attends: by default the fastest that there is; `"reference"` is the slow one to compare with.
            seed: From which the seeds of calls without one are derived.
            salt: Separates tenants: another salt never gives the same handle ids (see `tenant`).
            starts_per_s: Calls that may start in a second; the others wait. None: all at once.
            sink: Receives trace events on the engine's thread.
            timetable: Writes down what each step holds, or, made by `again()`, prescribes it: to compare two runs bit
                by bit.
            adapter: A folder with an adapter, a cache mapper or both, which calls of all tenants have unless they name
                another (see `load_adapter`).

        Raises:
            AdapterError: The adapter is another model's, or its files are damaged.
            UnsupportedModelError: The model cannot be served exactly. ValueError: A setting is out of range.
        """
        loaded = _loaded(model, device, dtype)
        memory = {"kv_budget_bytes": kv_budget_bytes, "host_bytes": host_bytes, "disk": disk, "disk_bytes": disk_bytes}
        memory |= {"mapped_storage": mapped_storage}
        settings = {"method": method, "step_tokens": step_tokens, "backend": backend, "seed": seed, "sink": sink}
        valid = Settings.model_validate(memory | settings | {"timetable": timetable})
        own = None if adapter is None else read_loaded(loaded.adapter, adapter, valid.mapped_storage)
        engine = cls(loaded, valid, salt=salt, starts_per_s=starts_per_s)
        if own is not None:
            engine._core.adapters.add_default(own)
        return engine

    def load_adapter(self, folder: str | Path, name: str | None = None) -> str:
        """Load an adapter, a cache mapper or both, for this tenant's calls that name it; others keep what they have.

        Calls of several adapters and of none share the engine's steps.

        Args:
            folder: That a training run of this package, or peft, has written.
            name: What calls call it; by default the folder's name.

        Returns:
            The name.

        Raises:
            AdapterError: It is another model's, its files are damaged, or another has that name.
        """
        loaded = read_loaded(self.model.adapter, folder, self._core.settings.mapped_storage)
        with self._core.lock:
            return self._core.adapters.add(loaded, name, self._desk.tenant)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that calls of this tenant can use: of the adapters that it has loaded, and of the engine's own."""
        return self._core.adapters.names(self._desk.tenant)

    def tenant(self, salt: str, *, starts_per_s: float | None = None) -> Engine:
        """The same engine for another tenant: one model, one pool, the same steps, but nothing found of each other.

        Handles of one tenant are unknown to another, and what one has encoded is never found again by another, in no
        tier. Scopes, rates, adapters and `memory_map` are its own; `stats`, `check`, `restart`, `close` the engine's.

        Args:
            salt: The tenant's secret.
            starts_per_s: Its calls that may start in a second, from now on and whoever makes them; the others wait in
                the order they came. None: as before, which is all at once unless it was said.
        """
        engine = Engine.__new__(Engine)
        engine._serve(self._core, self._desks, salt, starts_per_s)
        return engine

    @property
    def model(self) -> LoadedModel:
        return self._core.model

    @property
    def chat(self) -> ChatFormat:
        """How the model writes chat turns."""
        return self._core.model.chat

    @property
    def seed(self) -> int:
        return self._core.settings.seed

    @property
    def method(self) -> MethodName:
        return self._core.method.name

    def text(self, handle: MessageHandle, *, special: bool = True) -> str:
        """A message's text, with or without special tokens."""
        return self.model.decode(self.tokens(handle), special=special)

    def tokens(self, handle: MessageHandle) -> list[int]:
        """A message's token ids."""
        return list(self._desk.find(handle).tokens)

    def usage(self, handle: MessageHandle) -> Usage:
        """What the call that made a message cost."""
        return self._desk.find(handle).usage

    def logprobs(self, handle: MessageHandle) -> tuple[Chosen, ...]:
        """The tokens that were sampled for a message, with the log-probabilities that its call asked for."""
        return self._desk.find(handle).chosen

    def ancestors(self, handle: MessageHandle) -> dict[MessageHandle, str | None]:
        """All that a message's encoding has ever attended to, with authors: nearest first, released ones included."""
        return {message.handle: message.author for message in self._desk.find(handle).ancestors()}

    def joining(self) -> Joining:
        """What brings messages into the view of a decode while that is under way: `decode(..., joining=...)`."""
        return self._desk.joining()

    def joined(self, handle: MessageHandle) -> dict[MessageHandle, int]:
        """What came into a message's view while it was decoded, and after how many of its tokens, the header's too."""
        message = self._desk.find(handle)
        late = zip(message.parents, message.since, strict=False)
        return {parent.handle: since for parent, since in late if since}

    def records(self, handles: Sequence[MessageHandle]) -> tuple[MessageRecord, ...]:
        """How these messages and all that they descend from were made, released ones included: parents first.

        Raises:
            HandleError: A handle is unknown, released, or another model's.
        """
        return records_of(self._desk, handles)

    def audit(self, handles: Sequence[MessageHandle]) -> LineageReport:
        """Who influenced these messages, and how: what each attended to, and whose words it or that was made of.

        Raises:
            HandleError: A handle is unknown, released, or another model's.
        """
        return self._desk.audit(handles)

    def release(self, handle: MessageHandle, *, spare_only: bool = False) -> None:
        """Drop one lease; with `spare_only`, unless it is the last, after which KV is freed and the handle refused."""
        self._desk.release(handle, self._scope(), spare_only=spare_only)

    def pin(self, handle: MessageHandle) -> None:
        """Keep a message in the pool, however little room that leaves; `unpin` takes it back."""
        self._desk.pin(handle, 1)

    def unpin(self, handle: MessageHandle) -> None:
        """Undo one `pin`."""
        self._desk.pin(handle, -1)

    def park(self, scope: Scope | None = None) -> None:
        """Give the pool's memory back for now: of what only a scope leases, or of everything.

        What is being read or pinned stays. The rest goes to the host or the disk, or is forgotten and computed again,
        and comes back when it is next read: handles stay good.
        """
        self._desk.park(scope)

    @contextmanager
    def scope(self) -> Iterator[Scope]:
        """Drop, at the end of the block, every lease that was taken inside and not yet released.

        Yields:
            What `park` takes.
        """
        with entered(id(self._desk)) as scope:
            try:
                yield scope
            finally:
                self._core.close_scope(scope)

    def stats(self) -> EngineStats:
        """What the engine holds now and has done so far."""
        return self._core.stats()

    def memory_map(self) -> MemoryMap:
        """How much is in each tier, and which of the tenant's authors keep it there."""
        return self._desk.memory_map()

    def check(self) -> None:
        """Assert all invariants of memory and bookkeeping."""
        self._core.check()

    def restart(self) -> None:
        """Start again with empty memory; unfinished calls fail with `EngineClosedError`.

        Also after a failure that has ended its thread. Handles stay good: what is read again is computed again.

        Raises:
            EngineClosedError: The engine was closed, and stays so.
        """
        self._core.restart()

    def close(self) -> None:
        """Stop the engine; unfinished calls fail with `EngineClosedError`."""
        self._core.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _loaded(
    model: str | Path | LoadedModel, device: str | torch.device | None, dtype: torch.dtype | None
) -> LoadedModel:
    if not isinstance(model, LoadedModel):
        return load_model(model, device=device or "cpu", dtype=dtype)
    if device is not None or dtype is not None:
        raise InvalidRequestError("the model is loaded already: give device and dtype to load_model")
    return model
